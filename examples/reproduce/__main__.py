"""python -m examples.reproduce: the papers' routers on text that ships with Python.

Every method gets the same bytes, steps, sizes and initial seeds. Prints the
papers' metrics, says which of their directions show at this size and which do
not, and leaves the pictures in OUT/plots. A run that ended is not repeated.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys

from moe_mlir import plots
from moe_mlir_bench.demo.data import load_corpus

from . import report
from .methods import METHODS
from .model import Sizes
from .train import Budget, run

QUICK = Budget(
    steps=6, batch=2, windows=3,
    sizes=Sizes(context=16, layers=2, width=16, heads=2, experts=4, hidden=16),
)  # fmt: skip


def main(argv=None):
    options = _parse(argv)
    budget = QUICK if options.quick else dataclasses.replace(Budget(), steps=options.steps)
    seeds = range(1 if options.quick else options.seeds)
    methods = [dataclasses.replace(m, impl=options.impl) for m in METHODS if _wanted(m, options)]
    if not methods:
        names = ", ".join(m.name for m in METHODS)
        print(f"error: expected --methods to name some of: {names}", file=sys.stderr)
        return 2
    corpus = load_corpus()
    sizes = budget.sizes
    print(f"{len(methods)} methods, {len(seeds)} seeds, {budget.steps} steps of "
          f"{budget.batch} x {sizes.context} bytes; {sizes.layers} layers of width {sizes.width}, "
          f"{sizes.experts} experts, top {sizes.selected}", flush=True)
    results = {}
    for method in methods:
        runs = [run(method, seed, budget, corpus, options.out / "runs") for seed in seeds]
        results[method.name] = runs
        print(f"{method.name}: validation loss {statistics.mean(r.loss for r in runs):.3f}, "
              f"{sum(r.seconds for r in runs):.0f} s", flush=True)
    print(f"\n{report.table(results)}\n")
    print(f"What the papers say, at this size:\n{report.directions(methods, results)}\n")
    print(_honesty(budget, len(seeds)))
    histories = {name: runs[0].history for name, runs in results.items()}
    paths = plots.save_all(options.out / "plots", histories, baseline=methods[0].name)
    print(f"ok: {len(methods)} methods, {len(paths)} pictures in {options.out / 'plots'}")
    return 0


def _honesty(budget, seeds):
    return (
        f"These are {budget.steps} steps of a model thousands of times smaller than the papers', "
        f"with {seeds} seed(s): a direction that does not show here is no evidence against a "
        "paper, and one that shows is weak evidence for it. The paper's k of HyperRouter and "
        "SMoE-dropout grows during training; here it stays, so that budgets are equal. THOR "
        "passes twice. `router share` is CPU time of a forward without gradients on one thread."
    )


def _wanted(method, options):
    chosen = [name.strip().lower() for name in (options.methods or "").split(";") if name.strip()]
    return not chosen or method.name.lower() in chosen


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m examples.reproduce", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of each method, one seed")
    parser.add_argument("--steps", type=int, default=Budget.steps,
                        help=f"training steps (default: {Budget.steps})")
    parser.add_argument("--seeds", type=int, default=3, help="seeds a method (default: 3)")
    parser.add_argument("--methods", help='names separated by ";"; default: all')
    parser.add_argument("--impl", choices=("moe", "torch"), default="moe",
                        help="routers by compiled kernels or by plain torch (default: moe)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/reproduce"),
                        help="where runs and pictures go (default: out/reproduce)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
