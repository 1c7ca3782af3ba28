"""Measures the numbers of kernels on this machine, and keeps what is faster.

Kernels follow a model of the CPU's registers and caches; a few numbers of theirs
can be measured instead: how many rows, panels or queries share a cache, and how
far ahead is fetched. None of them changes a bit of a result, which is checked
here, too.

    moe tune                # measure, and keep what is 3 % faster
    moe tune --dry-run      # measure alone
    moe tune --list         # the numbers that kernels have now

What is kept stands in a table with an entry for each CPU (`tuning.json` in the
folder of the disk cache, or what MOE_MLIR_TUNING names), which compilations read.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._native import native
from .._support import files
from .._support.command_line import Parser, add_json, print_json
from .._support.progress import is_shown
from .._support.timing import Turns, count_sets
from ..compiler import jit, tuning_table
from ..compiler.uncached import target_cpu
from ..ops._expert_activation import ExpertActivation
from ..ops._kernel import Kernel, Tensor
from ..ops.grouped_linear import kernel as linear_kernel
from ..ops.router_logits import kernel as logits_kernel
from ..ops.similarity_inform import Form, Options
from ..ops.similarity_inform import kernel as mixing_kernel
from ..ops.topk_renorm import kernel as selection_kernel

if TYPE_CHECKING:
    from .._moe import Function

# What is kept makes its kernels so much faster together, and none so much slower.
_GAIN, _LOSS = 1.03, 0.95
_MOST_SETS, _ROUNDS = 8, 12
# The same code is up to a tenth slower at another address: each is loaded as often.
_COPIES = 3

Numbers = Mapping[str, int]


@dataclass(frozen=True)
class Probe:
    """A kernel that is measured, with a size for each name of one."""

    title: str
    kernel: Kernel
    sizes: Mapping[str, int]

    def _tensor(self, described: Tensor, generator) -> torch.Tensor:
        dims = [self.sizes.get(dim, dim) for dim in described.dims]
        if described.name == "offsets":
            rows, experts = self.sizes["r"], self.sizes["e"]
            return torch.arange(experts + 1, dtype=described.dtype) * (rows // experts)
        if not described.dtype.is_floating_point:
            return torch.zeros(dims, dtype=described.dtype)
        return (torch.randn(dims, generator=generator) / dims[-1] ** 0.5).to(described.dtype)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [self._tensor(described, generator) for described in self.kernel.inputs]

    def results(self) -> list[torch.Tensor]:
        return [self._tensor(described, None).zero_() for described in self.kernel.results]

    def compile(self, pipeline: str) -> "Function":
        executable = jit.load_or_compile(self.kernel.text(), pipeline)
        return executable.function(self.kernel.op)


def _product(rows, dtype):
    kernel = logits_kernel(dtype, dtype, None, 1024, 1024)
    return Probe(f"product {rows} x 1024 x 1024 {dtype}".replace("torch.", ""), kernel,
                 {"n": rows})


def _experts(rows):
    gated = ExpertActivation(activation="silu", gate="concatenated")
    kernel = linear_kernel(torch.float32, 1024, 1024, torch.int32, None, None, False,
                                   gated)
    return Probe(f"experts of {rows} rows 1024 -> 512", kernel,
                 {"r": 8 * rows, "e": 8, "b": 9})


def _mixing(tokens, width):
    form = Form(torch.float32, torch.float32, width, 16, width)
    options = Options(1.0, True, None, "all", "ieee")
    return Probe(f"similarity_inform {tokens} x {width}", mixing_kernel(form, options),
                 {"b": 1, "n": tokens})


def _selection(experts, k):
    kernel = selection_kernel(torch.float32, experts, k, "logits", True, 1.0, False,
                                torch.int32)
    return Probe(f"topk_renorm of {experts} experts, k {k}", kernel, {"n": 4096})


def _questions(registers: int):
    """(candidates, probes) in the order in which they are asked: later ones meet what is kept."""
    products = [_product(16, torch.float32), _product(256, torch.float32),
                _product(256, torch.bfloat16)]
    experts = [_experts(4), _experts(64)]
    selection = [_selection(64, 8), _selection(256, 8)]
    tiles = {32: ((4, 6), (2, 12), (2, 8)), 16: ((2, 6), (2, 4))}[registers]
    yield [{"product-vectors": v, "product-rows": r} for v, r in tiles], [*products, *experts]
    yield _each("product-panels", 2, 4, 8, 16), [*products, *experts]
    yield _each("expert-rows", 64, 128, 256), [_experts(64), _experts(256)]
    yield _each("mix-queries", 96, 192), [_mixing(768, 64), _mixing(768, 352)]
    yield _each("fetch-bytes", 1024, 2048, 4096, 8192), selection
    yield _each("tile-size", 48, 96, 192), [*selection, _mixing(768, 64)]


def _each(name, *values):
    return [{name: value} for value in values]


class Tuner:
    """Asks one question after the other, until time is up."""

    def __init__(self, cpu: str, seconds: float) -> None:
        self.cpu, self.key = cpu, native().describe_cpu(cpu)
        self.kept: dict[str, int] = {}
        self._end, self._seconds = time.monotonic() + seconds, seconds
        self.has_time = True

    def pipeline(self, numbers: Numbers) -> str:
        return native().cpu_pipeline(self.cpu, _table_text({self.key: dict(numbers)}))

    def ask(self, candidates: Sequence[Numbers], probes: Sequence[Probe]) -> list[str]:
        """Keeps the best candidate if it is worth it; returns a line for each."""
        if time.monotonic() > self._end:
            self.has_time = False
            return []
        asked = {_show(numbers): numbers for numbers in candidates
                 if self.pipeline({**self.kept, **numbers}) != self.pipeline(self.kept)}
        gains = self._gains(asked, probes)
        best = max(gains, key=lambda name: _together(gains[name]))
        kept = ""
        if _is_worth(gains[best]):
            # The best of several is one that luck helped: it has to be so again.
            again = self._gains({best: asked[best]}, probes)[best]
            kept = f"  again {_together(again):.3f}"
            if _is_worth(again):
                self.kept.update(asked[best])
            kept += ": kept" if _is_worth(again) else ": not kept"
        return [f"{name:<36} {_together(each):6.3f}  {_range(each)}"
                + (kept if name == best else "") for name, each in gains.items()]

    def _gains(self, asked, probes):
        """name of a candidate -> title of a probe -> how many times as fast as now."""
        now = self.pipeline(self.kept)
        others = {name: self.pipeline({**self.kept, **numbers}) for name, numbers in asked.items()}
        gains: dict[str, dict[str, float]] = {name: {} for name in others}
        for probe in probes:
            self._tell(probe.title)
            for name, gain in _measure(probe, now, others, self._seconds / 60).items():
                gains[name][probe.title] = gain
        return gains

    def _tell(self, title):
        if is_shown(sys.stderr):
            rest = max(0.0, self._end - time.monotonic())
            sys.stderr.write(f"\rmoe-mlir: measuring {title} ({rest:.0f} s left)\033[K")
            sys.stderr.flush()


def _measure(probe, now, others, seconds):
    """How many times as fast as `now` each candidate is."""
    inputs = [probe.inputs(0)]
    inputs += [probe.inputs(seed) for seed in range(1, count_sets(inputs[0], most=_MOST_SETS))]
    functions = {(name, copy): probe.compile(pipeline) for copy in range(_COPIES)
                 for name, pipeline in {**others, "": now}.items()}
    expected = _run(functions["", 0], probe, inputs[0])
    for (name, _), function in functions.items():
        found = _run(function, probe, inputs[0])
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"{probe.title}: expected the same bits with {name}, found "
                                 "others; this is a defect of the compiler")
    results = probe.results()
    thunks = {f"{name}\0{copy}": [lambda f=function, x=x: f(*x, *results) for x in inputs]
              for (name, copy), function in functions.items()}
    best: dict[str, float] = {}
    for label, taken in Turns(thunks, threads=1).samples(_ROUNDS, seconds).items():
        name = label.partition("\0")[0]
        best[name] = min(taken + [best.get(name, math.inf)])
    return {name: best[""] / best[name] for name in others}


def _run(function, probe, inputs):
    results = probe.results()
    function(*inputs, *results)
    return results


def _together(gains):
    return math.exp(sum(map(math.log, gains.values())) / len(gains))


def _is_worth(gains):
    return _together(gains) >= _GAIN and min(gains.values()) >= _LOSS


def _range(gains):
    return f"({min(gains.values()):.3f} to {max(gains.values()):.3f} of {len(gains)} kernels)"


def _show(numbers):
    return " ".join(f"{name}={value}" for name, value in numbers.items())


# ------------------------------------------------------------------------- table


def _table_text(cpus):
    return json.dumps({tuning_table.FORMAT: 1, "cpus": cpus}, indent=1) + "\n"


def write(path: Path, key: str, numbers: Numbers) -> None:
    """Puts the entry of a CPU into a table, as a whole or not at all.

    Raises:
        ValueError: `path` is another file than a table, which stays as it is.
    """
    cpus = tuning_table.read_cpus(path)
    cpus[key] = dict(numbers)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write(path, _table_text(cpus), private=True)


# ------------------------------------------------------------------------ command


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    path = tuning_table.table_path()
    if options.list:
        return _list(options, path)
    if path is None and not options.dry_run:
        print("expected MOE_MLIR_TUNING to name a table to write, found 'off'; --dry-run "
              "measures without one", file=sys.stderr)
        return 2
    if path is not None and not options.dry_run:
        try:
            tuning_table.read_cpus(path)  # before the minutes that it would be written after
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    torch.set_num_threads(1)
    tuner = Tuner(options.cpu, options.seconds)
    print(f"{tuner.key}\nhow many times as fast as now, of all kernels together:")
    registers = 32 if "vector-registers=32" in tuner.key else 16
    for candidates, probes in _questions(registers):
        lines = tuner.ask(candidates, probes)
        if is_shown(sys.stderr):
            sys.stderr.write("\r\033[K")
        print(*lines, sep="\n", flush=True)
    if not tuner.has_time:
        print(f"not all was asked within {options.seconds:g} s; --seconds gives more")
    print(f"kept: {_show(tuner.kept) or 'the modelled numbers'}")
    if path is not None and not options.dry_run:
        write(path, tuner.key, tuner.kept)
        print(f"written to {path}; running processes keep what they have")
    return 0


def _list(options, path) -> int:
    described, pipeline = native().describe_cpu(options.cpu), tuning_table.cpu_pipeline(options.cpu)
    if options.json:
        print_json({"cpu": described, "table": path, "pipeline": pipeline})
        return 0
    none_yet = "" if path is None or path.exists() else " (none yet)"
    print(f"CPU       {described}\n"
          f"table     {'off' if path is None else path}{none_yet}\n"
          f"pipeline  {pipeline}")
    return 0


_DESCRIPTION = """\
Measures the block sizes of kernels on this machine, and keeps what is faster.

They are rows, panels, and queries that share a cache, and the distance of prefetches. None of them
changes a bit of a result, which is checked, too. It takes one to two minutes. What is kept is
written to a table (MOE_MLIR_TUNING, or tuning.json in the folder of the cache), which later
compilations read."""


def parser() -> Parser:
    parser = Parser("tune", _DESCRIPTION, examples=(
        "moe tune              measure, and keep what is 3 % faster",
        "moe tune --dry-run    measure only",
        "moe tune --list       print the numbers that kernels have now"))
    add = parser.add_argument
    add("--cpu", metavar="NAME", help="the CPU whose kernels to measure, as MOE_MLIR_CPU has it "
        "(default: that, or this machine's)")
    add("--seconds", type=float, default=180.0, help="begin nothing new after (default 180)")
    add("--dry-run", action="store_true", help="measure, and write nothing")
    add("--list", action="store_true", help="print the numbers that kernels have now, and stop")
    add_json(parser)
    return parser


def _parse(arguments):
    options = parser().parse_args(arguments)
    if options.json and not options.list:
        parser().error("expected --json with --list, found it alone")
    if options.cpu:
        os.environ["MOE_MLIR_CPU"] = options.cpu
    try:
        options.cpu = target_cpu()
    except ValueError as error:
        parser().error(str(error))
    if not native().describe_cpu(options.cpu):
        parser().error(f"expected --cpu to be a name that LLVM knows, found '{options.cpu}'")
    return options


if __name__ == "__main__":
    sys.exit(main())
