"""Prints what can be known of the GPU kernels without a GPU, as Markdown.

  python utils/gpu_figures.py [--chip sm_90] [selection|router|mixing|attention|memory ...]
  python utils/gpu_figures.py --page        writes the tables of docs/Performance.md

`selection`: a kernel without loops issues each of its instructions once a warp,
so their number divided by the tokens of a warp is what a token costs (`-` for
kernels with loops). Instructions past the last exit pad the code and are not
counted; those of branches that only odd values take are.
`router`: projection and selection in one kernel, with the columns of `mixing` (`-`
where no loop is left), and the bytes that a block moves over those of its tokens,
weights and results.
`mixing`: the share of matrix (HMMA, or HGMMA on sm_90a; in f32, multiply-add)
instructions among those of the inner loop, registers, blocks an SM, and
shared-memory wavefronts a request.
`attention`: likewise, of attention that emits the entropies of its rows.
`memory`: bytes that the kernels move in the simulator, over the bytes of inputs
and results.

Needs the package, ptxas and nvdisasm (PATH, or the wheels nvidia-cuda-nvcc and
nvidia-cuda-nvdisasm). SASS is read, never executed; counts come from the simulator.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import moe_mlir
from moe_mlir.ops.topk_renorm import kernel as topk_kernel
from moe_mlir.runtime import compile_kernels_cached
from moe_mlir.simulate import device_functions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "Performance.md"
SELECTIONS = [
    (16, 2), (32, 4), (64, 2), (64, 8), (128, 8), (160, 6), (256, 8), (384, 8),
    (512, 10), (1024, 32), (2048, 64),
]  # fmt: skip
ROUTERS = [
    (352, 16, 2, "bf16"), (1024, 64, 8, "bf16"), (4096, 128, 8, "bf16"), (7168, 256, 8, "bf16"),
    (1024, 64, 8, "f16"), (1024, 64, 8, "f32"),
]  # fmt: skip
MIXINGS = [
    (64, 8, "bf16"), (128, 64, "bf16"), (352, 16, "bf16"), (512, 16, "bf16"), (1024, 64, "bf16"),
    (352, 16, "f16"), (64, 8, "f32"), (352, 16, "f32"), (352, 64, "f32"),
]  # fmt: skip
ATTENTIONS = [(64, "bf16"), (128, "bf16"), (128, "f16"), (44, "f32"), (64, "f32")]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# Of an SM: registers, threads, blocks, bytes of shared memory (and what a block reserves).
SM_REGISTERS, SM_THREADS, SM_BLOCKS, BLOCK_RESERVES = 65536, 2048, 32, 1024
SM_SHARED = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_90a": 228,
             "sm_100": 228, "sm_120": 100}


def find_tool(name: str) -> str:
    found = os.environ.get(name.upper()) or shutil.which(name)
    for folder in sys.path:
        wheel = Path(folder) / "nvidia" / "cu13" / "bin" / name
        if not found and wheel.exists():
            found = str(wheel)
    if not found:
        raise FileNotFoundError(f"expected {name} in PATH or in a wheel, found none")
    return found


@dataclass
class Code:
    """The machine code of one kernel."""

    instructions: list  # (mnemonic, labels in front of it, label it branches to)
    registers: int
    spilled: int
    static_shared: int

    @property
    def mnemonics(self):
        return [name for name, _, _ in self.instructions]

    def loops(self):
        """Ranges of instructions, from the target of a backward branch to the branch."""
        place = {label: i for i, (_, labels, _) in enumerate(self.instructions)
                 for label in labels}
        for i, (_, _, target) in enumerate(self.instructions):
            if target in place and place[target] <= i:
                yield self.mnemonics[place[target] : i + 1]

    @property
    def matrix_instruction(self) -> str:
        """Of whole warpgroups where it has any, else of warps."""
        return "HGMMA" if any(m.startswith("HGMMA") for m in self.mnemonics) else "HMMA"

    def densest_loop(self, prefix: str):
        """The loop with the largest share of instructions of this name, and the share."""
        shares = [(sum(m.startswith(prefix) for m in loop) / len(loop), len(loop))
                  for loop in self.loops()]
        return max(shares, default=(0.0, 0))

    def describe_loop(self, prefix: str) -> str:
        share, length = self.densest_loop(prefix)
        return f"{100 * share:.0f} % of {length}" if length else "-"

    def blocks_an_sm(self, threads: int, dynamic_shared: int, chip: str) -> int:
        # Registers are given to warps in units of 8 a thread.
        registers = -(-self.registers // 8) * 8 * threads
        shared = self.static_shared + dynamic_shared + BLOCK_RESERVES
        return min(SM_BLOCKS, SM_THREADS // threads, SM_REGISTERS // registers,
                   SM_SHARED[chip] * 1024 // shared)


def assemble(ptx: str, chip: str, name: str) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        log = subprocess.run(
            [find_tool("ptxas"), f"-arch={chip}", "-v", str(source), "-o", str(cubin)],
            capture_output=True, text=True, check=True,
        ).stderr
        listing = subprocess.run(
            [find_tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True,
        ).stdout
    return Code(read_listing(listing, name), *read_log(log, name))


def read_log(log: str, name: str):
    """Registers, spilled bytes and static shared memory of one kernel."""
    part = log.split(f"entry function '{name}'")[1].split("entry function")[0]
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
    shared = re.search(r"(\d+) bytes smem", part)
    return (int(re.search(r"Used (\d+) registers", part)[1]), spilled,
            int(shared[1]) if shared else 0)


def read_listing(listing: str, name: str) -> list:
    """The instructions of one kernel up to its last exit."""
    part = listing.split(f".text.{name}:", 1)[1].split("//-----", 1)[0]
    instructions, labels = [], []
    for line in part.splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels.append(label[1])
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line):
            target = re.search(r"`\((\.L_\w+)\)", line)
            instructions.append((found[1], tuple(labels), target[1] if target else None))
            labels = []
    last = max(i for i, (name, _, _) in enumerate(instructions) if name.startswith("EXIT"))
    return instructions[: last + 1]


def describe(text: str, chip: str):
    """The PTX of a module's only function and its kernels."""
    code = json.loads(compile_kernels_cached(text, chip))
    (function,) = code["functions"]
    return code["ptx"], function["kernels"]


def rows_of(kernel) -> int:
    """Rows that a block takes."""
    size = kernel["grid"][0]
    return size[2] if isinstance(size, list) and size[0] == "ceildiv" else 1


def print_selection(chip: str) -> None:
    for name in ("bf16", "f32"):
        print(f"\n### Selection, {name} scores, {chip}\n")
        print("| E | k | SASS a token | lanes a token | instructions | registers | spilled bytes |")
        print("|---|---|---|---|---|---|---|")
        for experts, chosen in SELECTIONS:
            text = topk_kernel(DTYPES[name], experts, chosen, "logits", True, 1.0, False,
                               torch.int32).text()
            ptx, (kernel,) = describe(text, chip)
            code = assemble(ptx, chip, kernel["name"])
            rows, threads = rows_of(kernel), kernel["block_size"]
            count = len(code.instructions)
            cost = "-" if any(code.loops()) else f"{count * threads / 32 / rows:.1f}"
            print(f"| {experts} | {chosen} | {cost} | {threads // rows} | {count} | "
                  f"{code.registers} | {code.spilled} |", flush=True)


def simulate(call, chip: str):
    """The texts that a call runs, and the counters of its kernels."""
    texts = []
    with moe_mlir.simulate(chip=chip, checks=()) as simulation:
        run = simulation.run
        simulation.run = lambda kernel, tensors: (
            texts.append(kernel.text()), run(kernel, tensors))
        results = call()
    return texts, [report.counters for report in simulation.reports], results


def router_text(width: int, experts: int, chosen: int, element: str) -> str:
    h, w = f"tensor<?x{width}x{element}>", f"tensor<{experts}x{width}x{element}>"
    z, g, i = f"tensor<?x{experts}xf32>", f"tensor<?x{chosen}xf32>", f"tensor<?x{chosen}xi32>"
    return f"""func.func @route(%h: {h}, %w: {w}) -> ({g}, {i}) {{
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : {h}
  %z0 = tensor.empty(%n) : {z}
  %g0 = tensor.empty(%n) : {g}
  %i0 = tensor.empty(%n) : {i}
  %z = moe.router_logits ins(%h, %w : {h}, {w}) outs(%z0 : {z}) -> {z}
  %r:2 = moe.topk_renorm ins(%z : {z}) outs(%g0, %i0 : {g}, {i}) -> {g}, {i}
  return %r#0, %r#1 : {g}, {i}
}}"""


def run_router(text, rows, width, experts, chosen, dtype, chip):
    """The counters of one block, and the bytes of its operands and results."""
    h = torch.randn(rows, width).to(dtype)
    w = (torch.randn(experts, width) / width**0.5).to(dtype)
    results = torch.empty(rows, chosen), torch.empty(rows, chosen, dtype=torch.int32)
    (report,) = device_functions(text, chip)["route"](h, w, *results, checks=())
    return report.counters, sum(x.nbytes for x in (h, w, *results))


def print_router(chip: str) -> None:
    print(f"\n### Router: projection and selection in one kernel, {chip}\n")
    print("| D | E | k | dtype | matrix instructions in the inner loop | registers | "
          "spilled bytes | blocks an SM | tokens a block | wavefronts a shared request | "
          "bytes over the least |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for width, experts, chosen, name in ROUTERS:
        text = router_text(width, experts, chosen, name)
        ptx, (kernel,) = describe(text, chip)
        code = assemble(ptx, chip, kernel["name"])
        loop = code.describe_loop("FFMA" if name == "f32" else "HMMA")
        rows = rows_of(kernel)
        first, least = run_router(text, rows, width, experts, chosen, DTYPES[name], chip)
        moved = first["global_bytes_read"] + first["global_bytes_written"]
        conflicts = first["shared_wavefronts"] / max(1, first["shared_requests"])
        dynamic = kernel.get("dynamic_smem", 0)
        print(f"| {width} | {experts} | {chosen} | {name} | {loop} | "
              f"{code.registers} | {code.spilled} | "
              f"{code.blocks_an_sm(kernel['block_size'], dynamic, chip)} | {rows} | "
              f"{conflicts:.3f} | {moved / least:.2f} |", flush=True)


def print_mixing(chip: str) -> None:
    cases = []
    for width, experts, name in MIXINGS:
        u = ((8 / width) ** 0.5 * torch.randn(1, 256, width)).to(DTYPES[name])
        p = torch.randn(1, 256, experts).softmax(-1).to(DTYPES[name])
        call = functools.partial(moe_mlir.similarity_inform, u, p, causal=False)
        cases.append(((width, experts, name), call))
    print_mixes(f"Mixing: `similarity_inform`, {chip}", ("D", "E", "dtype"), cases, chip)


def print_attention(chip: str) -> None:
    cases = []
    for width, name in ATTENTIONS:
        q, k, v = (torch.randn(1, 2, 256, width).to(DTYPES[name]) for _ in range(3))
        call = functools.partial(moe_mlir.attention, q, k, v, causal=True)
        cases.append(((width, name), call))
    title = f"Attention with the entropies of its rows: `attention`, {chip}"
    print_mixes(title, ("head width", "dtype"), cases, chip)


def print_mixes(title: str, labels, cases, chip: str) -> None:
    """`cases` are what stands under the labels, the dtype last, and a call of one kernel."""
    print(f"\n### {title}\n")
    header = (*labels, "matrix instructions in the inner loop", "registers", "spilled bytes",
              "blocks an SM", "threads", "wavefronts a shared request")
    print(f"| {' | '.join(header)} |")
    print("|---" * len(header) + "|")
    for values, call in cases:
        texts, counters, _ = simulate(call, chip)
        ptx, kernels = describe(texts[0], chip)
        code = assemble(ptx, chip, kernels[0]["name"])
        loop = code.describe_loop("FFMA" if values[-1] == "f32" else code.matrix_instruction)
        blocks = code.blocks_an_sm(kernels[0]["block_size"], kernels[0]["dynamic_smem"], chip)
        first = counters[0]
        conflicts = first["shared_wavefronts"] / max(1, first["shared_requests"])
        print(f"| {' | '.join(map(str, values))} | {loop} | {code.registers} | {code.spilled} | "
              f"{blocks} | {kernels[0]['block_size']} | {conflicts:.3f} |", flush=True)


def print_memory(chip: str) -> None:
    print(f"\n### Bytes moved over the least, {chip}\n")
    print("| call | kernels | bytes moved | inputs and results | ratio |")
    print("|---|---|---|---|---|")
    scores = torch.randn(2048, 64).bfloat16()
    calls = {
        "topk_renorm 2048x64 k8 bf16": ((scores,), lambda: moe_mlir.topk_renorm(scores, 8)),
    }
    for tokens in (2048, 16384):
        h, top1 = torch.randn(tokens, 256), torch.randint(64, (tokens,))
        indices = torch.rand(tokens, 64).topk(8).indices
        # The means are read first, then the deviations from them.
        calls[f"mad_dispersion {tokens}x256 E64"] = (
            (h, h, top1), functools.partial(moe_mlir.mad_dispersion, h, top1, 64))
        calls[f"adjacency_update {tokens} k8 E64"] = (
            (indices, torch.ones(64, 64)),
            functools.partial(moe_mlir.adjacency_update, torch.ones(64, 64), indices))
    for name, (inputs, call) in calls.items():
        _, counters, results = simulate(call, chip)
        results = results if isinstance(results, tuple) else (results,)
        moved = sum(c["global_bytes_read"] + c["global_bytes_written"] for c in counters)
        least = sum(x.nbytes for x in (*inputs, *results))
        print(f"| {name} | {len(counters)} | {moved} | {least} | {moved / least:.2f} |",
              flush=True)


SECTIONS = {
    "selection": print_selection, "router": print_router, "mixing": print_mixing,
    "attention": print_attention, "memory": print_memory,
}  # fmt: skip


def write_page(chip: str) -> None:
    """Puts all tables in place of those of the page, behind what it says of them."""
    tables = io.StringIO()
    with contextlib.redirect_stdout(tables):
        for name, print_section in SECTIONS.items():
            print_section(chip)
            if name in ("mixing", "attention") and chip == "sm_90":
                print_section("sm_90a")  # on warpgroups
    page = PAGE.read_text()
    begin = page.index("### ", page.index("<!-- gpu: written by"))
    end = page.index("<!-- gpu: end -->")
    PAGE.write_text(page[:begin] + tables.getvalue().lstrip() + page[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION",
                        help=f"which of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--chip", default="sm_90")
    parser.add_argument("--page", action="store_true",
                        help="write all tables into docs/Performance.md")
    options = parser.parse_args()
    if options.page:
        return write_page(options.chip)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"expected sections out of {', '.join(SECTIONS)}, found {sorted(unknown)}")
    for section in options.sections or SECTIONS:
        SECTIONS[section](options.chip)


if __name__ == "__main__":
    main()
