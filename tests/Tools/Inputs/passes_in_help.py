"""Prints each pass and pipeline of ours that the help text on stdin lacks, or lists unexplained."""

import pathlib
import re
import sys

source = pathlib.Path(sys.argv[1])
definitions = "".join(p.read_text() for p in sorted(source.glob("include/MoE/*/Passes.td")))
flags = re.findall(r'Pass<"([\w-]+)"', definitions)
for pipeline in sorted(source.glob("lib/Pipelines/*.cpp")):
    flags += re.findall(r'PassPipelineRegistration<.*?>\(\s*"([\w-]+)"', pipeline.read_text())
text = sys.stdin.read()
for flag in flags:
    summary = re.search(rf"^ +--{flag} +-   (.*)$", text, re.MULTILINE)
    if not summary:
        print(f"missing from the help: {flag}")
    elif len(summary[1].split()) < 4 or not summary[1][0].isupper():
        print(f"expected a sentence for {flag}, found: {summary[1]}")
print(f"{len(flags)} flags checked")
