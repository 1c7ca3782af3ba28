#!/usr/bin/env python3
"""Turns the IR examples of the manual into lit tests.

    make_doc_tests.py OUT_DIR (--ods RECORDS.json | --markdown FILE.md) ...

Every ```mlir fence of an op or pass description (`--ods`, the output of
`llvm-tblgen --dump-json`) and of a markdown page (`--markdown`) becomes one
.mlir file in OUT_DIR. The test parses and verifies the example twice, the
second time from what the first printed, and checks that the op which the text
is about is in it. A fence that is not meant to parse is marked ```mlir-invalid
or ```text, not silently skipped here.

Files that no longer have an example are removed, so a renamed op leaves no
stale test behind.
"""

import argparse
import json
import pathlib
import re
import sys

DIALECT = "moe"
FENCE = re.compile(r"^(?P<indent>[ \t]*)```mlir[ \t]*\n(?P<body>.*?)^(?P=indent)```[ \t]*$",
                   re.MULTILINE | re.DOTALL)
OP_NAME = re.compile(rf"(?<![#\w.]){DIALECT}\.[a-z_0-9]+")


def fences(text):
    """The bodies of the mlir fences of `text`, without their indentation."""
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        yield "".join(line[indent:] if line.strip() else line
                      for line in match["body"].splitlines(keepends=True))


def ods_descriptions(path):
    """(name, description, op name or None) of every op and pass of a JSON dump.

    A dump holds what the definitions include, hence the check of the dialect.
    """
    records = json.loads(pathlib.Path(path).read_text())
    classes = records["!instanceof"]
    for name in sorted(classes.get("Op", [])):
        record = records[name]
        dialect = records[record["opDialect"]["def"]]["name"]
        if dialect == DIALECT:
            op = f"{dialect}.{record['opName']}"
            yield op, record.get("description") or "", op
    for name in sorted(classes.get("PassBase", [])):
        record = records[name]
        yield record["argument"], record.get("description") or "", None


def write_test(folder, stem, number, source, body, op):
    """Writes one test and returns its path. Without `op` it checks the first op
    of the dialect that the example itself holds, if any."""
    if op is None:
        found = OP_NAME.search(re.sub(r"//.*", "", body))
        op = found.group(0) if found else None
    check = "| FileCheck %s" if op else "-o /dev/null"
    lines = [f"// RUN: %moe-opt %s | %moe-opt {check}", "",
             f"// Generated from {source}; edit the example there.", ""]
    if op:
        lines += [f"// CHECK: {op}{{{{[^a-z_0-9]}}}}", ""]
    path = folder / f"{stem.replace('.', '-')}-{number}.mlir"
    text = "\n".join(lines) + "\n" + body
    # An unchanged test keeps its time stamp.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=pathlib.Path)
    parser.add_argument("--ods", action="append", default=[], metavar="JSON")
    parser.add_argument("--markdown", action="append", default=[], metavar="MD")
    args = parser.parse_args()

    args.out_dir.mkdir(parents=True, exist_ok=True)
    written, missing = set(), []
    for dump in args.ods:
        for name, description, op in ods_descriptions(dump):
            bodies = list(fences(description))
            if op and not bodies:
                missing.append(op)
            for number, body in enumerate(bodies, 1):
                source = f"the description of {name}"
                written.add(write_test(args.out_dir, name, number, source, body, op))
    for page in map(pathlib.Path, args.markdown):
        for number, body in enumerate(fences(page.read_text()), 1):
            written.add(write_test(args.out_dir, page.stem, number,
                                   f"docs/{page.name}", body, None))
    for stale in set(args.out_dir.glob("*.mlir")) - written:
        stale.unlink()
    if missing:
        sys.exit("expected an ```mlir example in the description of every op, "
                 f"found none in: {', '.join(missing)}")


if __name__ == "__main__":
    main()
