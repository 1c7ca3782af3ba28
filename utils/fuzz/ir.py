"""Modules through moe-opt: many in one process, and one by one where a process dies.

A module that is refused must be told why; a signal, a failed assertion, or more than ten seconds
are findings.
"""

import os
import random
import re
import resource
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import modules

SEPARATOR = "// -----\n"
BATCH = 40
# Of the processor; of the clock where somebody else has it.
SECONDS_PER_MODULE = 10
PATIENCE = 120

# What a batch goes through, and how often. Single passes come from moe-opt's own help.
PIPELINES = [
    (["--verify-roundtrip"], 4),
    (["--canonicalize", "--cse"], 3),
    (["--moe-decompose", "--canonicalize"], 2),
    (["--moe-to-cpu"], 4),
    (["--moe-to-cpu=threads=false"], 1),
    (["--moe-to-nvvm"], 3),
    (["--moe-to-nvvm=chip=sm_90a"], 1),
    (["--one-shot-bufferize=bufferize-function-boundaries", "--canonicalize"], 2),
    (["--generate-runtime-verification"], 1),
    (["--emit-bytecode"], 1),
]


@dataclass
class Finding:
    options: list
    module: str
    what: str


def _run(tool, options, text, seconds):
    """(exit status or None for a timeout, what was written to stderr)."""
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))

    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(text)
        file.flush()
        try:
            done = subprocess.run(
                [tool, "--split-input-file", "--mlir-disable-threading", file.name, *options],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=PATIENCE,
                errors="replace", preexec_fn=limit)
        except subprocess.TimeoutExpired:
            return None, ""
    return None if done.returncode == -signal.SIGXCPU else done.returncode, done.stderr


# Assertions of MLIR 22.1.8 in its own ops, which edits of the lit suite's modules meet.
UPSTREAM = (
    "willBeValidAffineMap",  # tensor.expand_shape with a negative dimension
    "created with unregistered dialect",  # an op whose name begins with a dot
)


def _judge(status, errors):
    """What is wrong with an end, or None."""
    if any(name in errors for name in UPSTREAM):
        return None
    if status is None:
        return f"no end within {SECONDS_PER_MODULE} s"
    if "Sanitizer" in errors or "runtime error:" in errors:
        return re.search(r".*(?:Sanitizer|runtime error:).*", errors)[0]
    if status not in (0, 1):
        failed = re.search(r".*(?:Assertion|LLVM ERROR|PLEASE submit).*", errors)
        return f"exit status {status}: {failed[0] if failed else ''}"
    if status == 1 and "error:" not in errors:
        return "refused without an error message"
    return None


def run_batch(tool, options, batch):
    """The findings of a batch."""
    if _judge(*_run(tool, options, SEPARATOR.join(batch), 20 + len(batch))) is None:
        return []
    findings = []
    for module in batch:
        if what := _judge(*_run(tool, options, module, SECONDS_PER_MODULE)):
            findings.append(Finding(options, module, what))
    return findings


def read_seeds(root: Path) -> list:
    """Every module of the lit suite, and earlier findings."""
    seeds = []
    for folder in ("tests", "utils/fuzz/corpus/ir"):
        for path in sorted((root / folder).rglob("*.mlir")):
            for module in re.split(r"^// -----.*\n", path.read_text(), flags=re.M):
                module = re.sub(r"//.*\n", "\n", module)
                if len(module) < 20_000:
                    seeds.append(module)
    return seeds


def single_passes(tool) -> list:
    help_text = subprocess.run([tool, "--help"], capture_output=True, text=True).stdout
    return re.findall(r"^\s+(--(?:moe|convert-moe)-[\w-]+)", help_text, flags=re.M)


def draw_batch(draw, seeds):
    batch = []
    for _ in range(BATCH):
        kind = draw.random()
        module = modules.draw_module(draw) if kind < 0.6 else draw.choice(seeds)
        # A third stays valid: it must compile, or be refused with a reason.
        if kind > 0.2:
            module = modules.edit(module, draw)
        # A separator of a module's own would end it.
        batch.append(module.replace("// -----", "") + "\n")
    return batch


def choose_options(draw, passes):
    choices = [options for options, weight in PIPELINES for _ in range(weight)]
    choices += [[name] for name in passes]
    return draw.choice(choices)


def fuzz(root: Path, tool: str, runs: int, seed: int, out: Path, expired) -> tuple[int, list]:
    """(modules that were run, findings). `expired()` says when to stop early."""
    os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=0:detect_container_overflow=0")
    seeds, passes = read_seeds(root), single_passes(tool)
    done, findings = 0, []
    while done < runs and not expired():
        draw = random.Random(f"{seed}:{done}")
        options = choose_options(draw, passes)
        batch = draw_batch(draw, seeds)[: runs - done]
        for finding in run_batch(tool, options, batch):
            findings.append(finding)
            path = out / f"ir-{seed}-{done}-{len(findings)}.mlir"
            path.write_text(f"// moe-opt {' '.join(options)}\n// {finding.what}\n{finding.module}")
            print(f"finding: {path}: {finding.what}", flush=True)
        done += len(batch)
    return done, findings
