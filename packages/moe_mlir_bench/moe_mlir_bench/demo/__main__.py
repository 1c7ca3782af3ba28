"""`moe demo`: from a torch model to compiled, checked, running code."""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from moe_mlir._support.command_line import Parser

from .data import load_corpus
from .model import Config

METHODS = ("smoe", "similarity")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        print(run(options))
        return 0
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


def parser() -> Parser:
    parser = Parser("demo", "Trains a small mixture-of-experts language model, compiles it for this "
                    "CPU and for an\nNVIDIA chip, and compares it with eager PyTorch: two minutes on two "
                    "cores. It needs no GPU,\nand writes IR, PTX and plots below `--out`.",
                    examples=("moe demo", "moe demo --steps 50 --out results"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"),
                        help="where everything that the job makes goes (default: out)")
    parser.add_argument("--steps", type=int, default=Config.steps,
                        help=f"training steps (default: {Config.steps})")
    parser.add_argument("--chip", default="sm_90", help="NVIDIA chip to compile for (default: %(default)s)")
    return parser


def run(options: Any) -> str:
    """The whole job; returns the line that tells the end well, raises where it is not."""
    from . import compare, report
    from .train import train_or_load

    corpus = load_corpus()
    print(f"text: {len(corpus.train) + len(corpus.validation):,} bytes of Python's standard "
          "library", flush=True)
    trained, comparisons = {}, []
    for method in METHODS:
        config = dataclasses.replace(Config(), method=method, steps=options.steps)
        trained[method] = result = train_or_load(config, corpus, options.out / "checkpoints")
        what = "reused from an earlier run" if result.reused else f"{result.seconds:.0f} s"
        print(f"{method}: trained {config.steps} steps ({what}), loss {result.losses[0]:.2f} -> "
              f"{result.losses[-1]:.2f}, validation {result.validation_loss:.2f}", flush=True)
        comparison = compare.compare(result, corpus, options.chip, options.out / method)
        comparisons.append(comparison)
        print(f"\nrouting of {method}, layer 0:\n{comparison.routing_ir}", flush=True)
    print(report.table(comparisons))
    for c in comparisons:
        if c.near_ties:
            print(f"{c.method}: {c.near_ties} of {c.sequences + c.near_ties} sequences hold a "
                  "near tie between experts and are not compared")
    for c in comparisons:
        if c.inductor_reason:
            print(f"{c.method}: no time of Inductor: {c.inductor_reason}")
    for c in comparisons:
        if c.chip_reason:
            print(f"{c.method}: no kernels for {options.chip} yet: {c.chip_reason}")
    report.plot(options.out / "plots", trained, comparisons)
    compare.write_metrics(options.out / "metrics.json", trained, comparisons)
    return _verdict(comparisons, options.out)


def _verdict(comparisons, out) -> str:
    from .compare import TOLERANCE
    for c in comparisons:
        if not c.max_error <= TOLERANCE:
            raise AssertionError(f"{c.method}: expected a relative error of at most {TOLERANCE:g} "
                                 f"against eager, found {c.max_error:.2e}")
        if not c.sequences:
            raise AssertionError(f"{c.method}: every sequence holds a near tie; nothing compared")
    if not any(c.kernels for c in comparisons):
        raise AssertionError("expected GPU kernels for at least one router, found none: "
                             + "; ".join(c.chip_reason for c in comparisons))
    worst = max(c.max_error for c in comparisons)
    return (f"ok: {len(comparisons)} models compiled and equal to eager (max relative error "
            f"{worst:.1e}); see {out}/")


if __name__ == "__main__":
    sys.exit(main())
