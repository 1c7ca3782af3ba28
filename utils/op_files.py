#!/usr/bin/env python3
"""Writes into docs/Architecture.md in which files the code of each op is, as the sources say.

    PYTHONPATH=build/python python utils/op_files.py [--write docs/Architecture.md]
"""

import pathlib
import re

from moe_mlir._support.page_table import PageTable

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIALECT = "lib/Dialect/MoE"
CPU, GPU = "lib/Conversion/MoEToCPU", "lib/Conversion/MoEToGPU"
HEAD = ("op", "in other ops", "kernel for the CPU", "kernel for GPUs")
# An op has its class as the argument of these.
KERNEL = r"\b(?:KernelPattern|ScheduleToThreads|ScheduleToGrid|OpRewritePattern)<\s*(\w+)Op\b"
DECOMPOSITION = r"\bdecompose\(\s*(\w+)Op op\b"


def sources(folder, suffix=".cpp"):
    for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
        yield path.relative_to(ROOT / folder), path.read_text()


def ops():
    """The class of each op of the dialect and its name in IR, in the order of the sources."""
    return {found[1]: found[2]
            for _, text in sources("include/MoE/Dialect/MoE/IR", ".td")
            for found in re.finditer(r"^def MoE_(\w+)Op\s*:\s*\w+<\s*\"(\w+)\"", text, re.MULTILINE)}


def files(folder, pattern):
    """{class of an op: the file of a folder in which a pattern names it}."""
    found = {}
    for path, text in sources(folder):
        for match in re.finditer(pattern, text):
            found.setdefault(match[1], path.as_posix())
    return found


def mixing_ops():
    """The ops that are written with moe.softmax_mix."""
    text = (ROOT / DIALECT / "IR" / "MoEDialect.cpp").read_text()
    promised = re.search(r"declarePromisedInterfaces<MixingOpInterface,([^>]*)>", text)
    assert promised, "expected the ops with MixingOpInterface in MoEDialect.cpp"
    return re.findall(r"(\w+)Op\b", promised[1])


def rows():
    """(name, decomposition, kernel for the CPU, kernel for GPUs) of each op; "" where there is none."""
    decompositions = files(f"{DIALECT}/Decompositions", DECOMPOSITION)
    cpu, gpu, mixing = files(CPU, KERNEL), files(GPU, KERNEL), mixing_ops()
    for kind, name in ops().items():
        other = decompositions.get(kind, "")
        yield name, f"softmax_mix, {other}" if kind in mixing else other, cpu.get(kind, ""), gpu.get(kind, "")


def table():
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for name, *where in rows():
        cells = [", ".join(f"`{part}`" for part in cell.split(", ") if part) for cell in where]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLE = PageTable("python utils/op_files.py", table)


if __name__ == "__main__":
    TABLE.run(__doc__)
