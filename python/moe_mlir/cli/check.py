"""`moe check FILE.py`: a program whose Triton kernels run in the simulator, with checks.

Every `kernel[grid](..)` of the program is compiled by Triton for the chip and run by the
simulator instead of a GPU. What the program asks of the device "cuda" is made on the CPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from .. import sim
from .._support.command_line import Parser, add_json, print_json
from ..sim.triton import capability_of


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what a program asks for on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _without_gpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_without_gpu, args), **kwargs)


def _without_gpu(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


class _Driver:
    """What programs ask Triton's driver for before they launch anything."""

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0


class Checker:
    """Runs launches of Triton's kernels in the simulator and keeps what it finds."""

    def __init__(self, chip: str, seed: int = 0, policy: int = 0):
        self.chip, self.seed, self.policy = chip, seed, policy
        self.reports: list[sim.Report] = []

    def launch(self, kernel: Any, *args: Any, grid: Any, **options: Any) -> Any:
        """Takes the place of a launch by Triton: compiles and runs for the chip."""
        arguments = {param.name: param.default for param in kernel.params if param.has_default}
        arguments.update(zip(kernel.arg_names, args))
        arguments.update((name, options.pop(name)) for name in kernel.arg_names if name in options)
        compiled = sim.compile_triton(kernel, arguments, chip=self.chip, **options)
        self.reports.append(sim.launch_triton(
            compiled, grid(arguments) if callable(grid) else grid, arguments, seed=self.seed,
            policy=1 if self.policy else 0))
        return compiled

    def findings(self) -> list[dict[str, Any]]:
        """Every finding once, with the number of accesses that showed it."""
        found: dict[tuple, dict[str, Any]] = {}
        for report in self.reports:
            for one in report.findings:
                key = (one.kernel, one.kind, one.source, one.message)
                entry = found.setdefault(key, {"kernel": one.kernel, "kind": one.kind,
                                               "source": one.source, "message": one.message,
                                               "count": 0})
                entry["count"] += one.count
        return list(found.values())


def _run_once(function, *_, quantiles=None, **__):
    """Takes the place of Triton's benchmarks: one call, and no time."""
    function()
    return math.nan if quantiles is None else [math.nan] * len(quantiles)


@contextlib.contextmanager
def checked(checker: Checker) -> Iterator[None]:
    """Inside, launches of Triton's kernels go to `checker`. Of an autotuned one the first
    configuration is taken, and what is benchmarked runs once: times in the simulator say nothing."""
    import triton.testing
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    compile_or_launch, before = JITFunction.run, driver._active

    def run(kernel, *args, grid, warmup, **options):
        if warmup:
            return compile_or_launch(kernel, *args, grid=grid, warmup=True, **options)
        return checker.launch(kernel, *args, grid=grid, **options)

    driver.set_active(_Driver())
    try:
        with (mock.patch.object(JITFunction, "run", run),
              mock.patch.object(Autotuner, "prune_configs", lambda self, _: self.configs[:1]),
              mock.patch.object(triton.testing, "do_bench", _run_once),
              mock.patch.object(triton.testing, "do_bench_cudagraph", _run_once),
              mock.patch.object(torch.cuda, "synchronize", lambda *_: None), _OnCpu()):
            yield
    finally:
        driver.set_active(before)


def parser() -> Parser:
    parser = Parser("check", "Runs a Python program whose Triton kernels are executed in the "
                    "simulator instead of a GPU,\nwith checks for races, accesses out of bounds, "
                    "uninitialised memory, and misalignment.\nTensors on \"cuda\" are made on the "
                    "CPU. Exits with status 1 if something was found.",
                    examples=("moe check softmax.py", "moe check softmax.py --rows 512",
                              "moe check --chip sm_80 --seed 3 --json softmax.py"))
    add = parser.add_argument
    add("file", metavar="FILE.py", help="the program")
    add("arguments", nargs="*", metavar="ARGUMENT", default=[], help="what the program gets as sys.argv[1:]")
    add("--chip", default="sm_90", help="NVIDIA chip to compile for (default: %(default)s)")
    add("--seed", type=int, default=0, help="order of blocks, warps, and copies (default: 0)")
    add("--policy", type=int, choices=(0, 1), default=0,
        help="threads of a warp reconverge early (0, default) or late (1)")
    add_json(parser)
    return parser


def _parse(argv):
    """What follows the program's name is the program's."""
    found = parser()
    options, rest = found.parse_known_args(argv)
    if rest and rest[0] not in argv[argv.index(options.file):]:
        found.parse_args(argv)
    if not os.path.isfile(options.file):
        found.error(f"expected a Python program, found no file {options.file}")
    try:
        capability_of(options.chip)
    except ValueError as error:
        found.error(str(error))
    options.arguments = argv[argv.index(options.file) + 1:]
    return options


def _run(options, checker) -> bool:
    """Whether the program came to its end."""
    sys.argv = [options.file, *options.arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.file)))
    printed = sys.stderr if options.json else sys.stdout
    try:
        with checked(checker), contextlib.redirect_stdout(printed):
            runpy.run_path(options.file, run_name="__main__")
    except SystemExit as end:
        return not end.code
    except Exception:
        traceback.print_exc()
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(list(sys.argv[1:] if argv is None else argv))
    checker = Checker(options.chip, options.seed, options.policy)
    try:
        import triton  # noqa: F401
    except ImportError:
        parser().error("expected Triton to be installed, found none; `pip install triton` works "
                       "without a GPU")
    ended = _run(options, checker)
    findings = checker.findings()
    kernels = {report.kernel for report in checker.reports}
    if options.json:
        print_json({"launches": len(checker.reports), "kernels": sorted(kernels),
                    "ended": ended, "findings": findings})
    else:
        for one in findings:
            print(f"{one['kind']}: {one['source'] or one['kernel']}: {one['message']}")
        print(f"launches: {len(checker.reports)}, kernels: {len(kernels)}, "
              f"findings: {len(findings)}")
    if ended and not checker.reports:
        print(f"moe check: warning: expected {options.file} to launch kernels of Triton, found no "
              "launch: nothing was checked; a file that only defines kernels needs a call of them",
              file=sys.stderr)
    return 2 if not ended else int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
