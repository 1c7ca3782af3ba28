"""Prints what the selection kernels cost: SASS instructions a token, registers.

  python utils/selection_sass.py [--chip sm_90] [--dtype bf16]

A kernel with a loop has no static cost a token: `-`. Needs moe-opt (MOE_OPT or PATH), ptxas and nvdisasm (PATH, or the wheels
nvidia-cuda-nvcc and nvidia-cuda-nvdisasm). Nothing is executed: a kernel without
loops issues each of its instructions once a warp, so their number divided by the
tokens of a warp is what a token costs. Instructions past the last exit pad the
code and are not counted; those of branches that only odd values take are.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPES = [
    (16, 2), (32, 4), (64, 2), (64, 8), (128, 8), (160, 6), (256, 8), (384, 8),
    (512, 10), (1024, 32), (2048, 64),
]


def find_tool(name: str) -> str:
    found = os.environ.get(name.upper().replace("-", "_")) or shutil.which(name)
    for folder in sys.path:
        wheel = Path(folder) / "nvidia" / "cu13" / "bin" / name
        if not found and wheel.exists():
            found = str(wheel)
    if not found:
        raise FileNotFoundError(f"expected {name} in PATH or in a wheel, found none")
    return found


def module_text(experts: int, selected: int, dtype: str) -> str:
    z, g, i = f"tensor<?x{experts}x{dtype}>", f"tensor<?x{selected}xf32>", f"tensor<?x{selected}xi32>"
    return f"""
func.func @select(%z: {z}) -> ({g}, {i}) {{
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : {z}
  %g0 = tensor.empty(%n) : {g}
  %i0 = tensor.empty(%n) : {i}
  %r:2 = moe.topk_renorm ins(%z : {z}) outs(%g0, %i0 : {g}, {i}) -> {g}, {i}
  return %r#0, %r#1 : {g}, {i}
}}"""


def compile_to_ptx(text: str, chip: str) -> tuple[str, int, int]:
    """The PTX, the rows and the threads of a block."""
    printed = subprocess.run(
        [find_tool("moe-opt"), "-", f"--moe-to-nvvm=chip={chip}", "--mlir-print-local-scope"],
        input=text, capture_output=True, text=True, check=True,
    ).stdout
    ptx = re.search(r'assembly = "((?:[^"\\]|\\.)*)"', printed).group(1)
    ptx = re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), ptx)
    rows = re.search(r"s0 ceildiv (\d+)", printed)
    threads = int(re.search(r"block_size = (\d+)", printed).group(1))
    return ptx, int(rows.group(1)) if rows else 1, threads


def has_loop(ptx: str) -> bool:
    """Whether a branch goes back."""
    seen = set()
    for line in ptx.splitlines():
        if label := re.match(r"(\$L\w+):", line):
            seen.add(label.group(1))
        elif (branch := re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)) and branch.group(1) in seen:
            return True
    return False


def assemble(ptx: str, chip: str) -> tuple[list[str], int, int]:
    """The mnemonics up to the last exit, the registers, the spilled bytes."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        log = subprocess.run(
            [find_tool("ptxas"), f"-arch={chip}", "-v", str(source), "-o", str(cubin)],
            capture_output=True, text=True, check=True,
        ).stderr
        listing = subprocess.run(
            [find_tool("nvdisasm"), "-c", str(cubin)],
            capture_output=True, text=True, check=True,
        ).stdout
    mnemonics = re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing
    )
    last = max(n for n, name in enumerate(mnemonics) if name.startswith("EXIT"))
    registers = int(re.search(r"Used (\d+) registers", log).group(1))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    return mnemonics[: last + 1], registers, spilled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chip", default="sm_90")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    options = parser.parse_args()
    print(f"{options.chip}, {options.dtype} scores")
    print("| E | k | SASS a token | lanes a token | instructions | registers | spilled bytes |")
    print("|---|---|---|---|---|---|---|")
    for experts, selected in SHAPES:
        ptx, rows, threads = compile_to_ptx(
            module_text(experts, selected, options.dtype), options.chip
        )
        mnemonics, registers, spilled = assemble(ptx, options.chip)
        tokens = rows * 32 / threads
        cost = "-" if has_loop(ptx) else f"{len(mnemonics) / tokens:.1f}"
        print(
            f"| {experts} | {selected} | {cost} | "
            f"{threads // rows} | {len(mnemonics)} | {registers} | {spilled} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
