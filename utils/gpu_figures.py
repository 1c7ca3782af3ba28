"""Prints what a GPU took for the kernels, and what can be known of them without one, as Markdown.

  python utils/gpu_figures.py [--chip sm_90] [selection|router|mixing|attention|memory ...]
  python utils/gpu_figures.py --page        writes the tables of docs/GPUPerformance.md
  python utils/gpu_figures.py --record DIR  keeps what a report of gpu_check measured

`measured`: times and rates of the last report that was recorded (utils/gpu_model/measured.json).

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
`time`: what utils/gpu_model says of the calls that matter on H100 and H200.
`published`: what it says of kernels whose times others have published (needs triton).

Needs the package, ptxas and nvdisasm (PATH, or the wheels nvidia-cuda-nvcc and
nvidia-cuda-nvdisasm). SASS is read, never executed; counts come from the simulator.
"""

import argparse
import contextlib
import functools
import io
import json
import sys
from pathlib import Path

import torch

import moe_mlir
from moe_mlir.compiler.chips import chips, own_chip
from moe_mlir.compiler.jit import compile_kernels_cached
from moe_mlir.ops.topk_renorm import kernel as topk_kernel
from moe_mlir.sim.simulation import device_functions

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_model import measured, tables
from gpu_model.calls import router_text
from gpu_model.sass import assemble, find_tool  # noqa: F401

PAGE = Path(__file__).resolve().parents[1] / "docs" / "GPUPerformance.md"
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
# No fewer tokens take the router's kernel for many.
MANY_TOKENS = 257
ATTENTIONS = [(64, "bf16"), (128, "bf16"), (128, "f16"), (44, "f32"), (64, "f32")]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


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


def run_router(text, kernel, width, experts, chosen, dtype, chip):
    """The counters of one block of the kernel for many tokens, and the bytes of its
    operands and results."""
    rows = rows_of(kernel)
    blocks = 1 + MANY_TOKENS // rows
    h = torch.randn(blocks * rows, width).to(dtype)
    w = (torch.randn(experts, width) / width**0.5).to(dtype)
    results = (torch.empty(blocks * rows, chosen),
               torch.empty(blocks * rows, chosen, dtype=torch.int32))
    (report,) = device_functions(text, chip)["route"](h, w, *results, checks=())
    assert report.kernel == kernel["name"], report.kernel
    least = w.nbytes + sum(x.nbytes for x in (h, *results)) / blocks
    return {name: count / blocks for name, count in report.counters.items()
            if isinstance(count, int)}, least


def print_router(chip: str) -> None:
    print(f"\n### Router: projection and selection in one kernel, {chip}\n")
    print("| D | E | k | dtype | matrix instructions in the inner loop | registers | "
          "spilled bytes | blocks an SM | tokens a block | wavefronts a shared request | "
          "bytes over the least |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for width, experts, chosen, name in ROUTERS:
        text = router_text(width, experts, chosen, name)
        ptx, kernels = describe(text, chip)
        kernel = kernels[-1]  # those before it are for few tokens
        code = assemble(ptx, chip, kernel["name"])
        loop = code.describe_loop("FFMA" if name == "f32" else "HMMA")
        rows = rows_of(kernel)
        first, least = run_router(text, kernel, width, experts, chosen, DTYPES[name], chip)
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


def print_time(chip: str) -> None:
    tables.print_calls()
    tables.print_constants()


def print_published(chip: str) -> None:
    tables.print_published()


def print_measured(chip: str) -> None:
    measured.print_measured()
    measured.print_limits()


SECTIONS = {
    "measured": print_measured,
    "selection": print_selection, "router": print_router, "mixing": print_mixing,
    "attention": print_attention, "memory": print_memory, "time": print_time,
    "published": print_published,
}  # fmt: skip


def write_page(chip: str) -> None:
    """Puts all tables in place of those of the page, behind what it says of them."""
    tables = io.StringIO()
    with contextlib.redirect_stdout(tables):
        for name, print_section in SECTIONS.items():
            print_section(chip)
            if name in ("mixing", "attention") and own_chip(chips()[chip].number) != chip:
                print_section(own_chip(chips()[chip].number))  # on warpgroups
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
                        help="write all tables into docs/GPUPerformance.md")
    parser.add_argument("--record", type=Path, metavar="DIR",
                        help="take the times of this report of gpu_check for the measured ones")
    options = parser.parse_args()
    if options.record:
        return measured.record(options.record)
    if options.page:
        return write_page(options.chip)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"expected sections out of {', '.join(SECTIONS)}, found {sorted(unknown)}")
    for section in options.sections or SECTIONS:
        SECTIONS[section](options.chip)


if __name__ == "__main__":
    main()
