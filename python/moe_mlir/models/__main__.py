"""`python -m moe_mlir.models [NAME ..] [--output docs/Models.md]` measures, writes the table.

`python -m moe_mlir.models decisions` compares the choices of all targets (decisions.py).
`python -m moe_mlir.models --speed [--output docs/Models.md]` measures models of real widths
(speed.py), a section of the page that is written on its own.
"""

import argparse
import logging
import platform
import sys
import warnings
from collections.abc import Sequence

import torch

from . import page, ties
from .families import FAMILIES
from .measure import measure

_HEAD = """\
# Models

Written by `python -m moe_mlir.models --output docs/Models.md`; do not edit. Every model is a tiny
random configuration of transformers {transformers} (`moe_mlir.models.FAMILIES`), with two layers
that have routers where its structure allows, in f32 with torch {torch} on {machine}.

| model | form | routers | import | compile, s | error | gradients | router | whole |
|---|---|---|---|---|---|---|---|---|
"""

_TAIL = """
- **form**: how the router is written, as `moe_mlir.explain` names it, which says it in words, too
  (`python/moe_mlir/fx/match.py`); **routers**: how many were recognised, of those that there are.
- **import**: lines of IR of the whole model, weights outside. One module serves every batch and
  token count, except for Jamba, whose own code is unrolled over the tokens. Switch is imported
  after `moe_mlir.hf.patch`, which replaces its loop over experts.
- **compile**: CPU seconds from IR to machine code.
- **error**: of the compiled model's logits against eager, relative to the largest logit, at two
  shapes; **gradients**: of `torch.compile(backend="moe")` against eager, the largest over all
  parameters, relative to each one's largest gradient.
- **router**: eager time of the model's router module over that of the same module on moe ops, for
  512 tokens of 256 features and 64 experts, least CPU time of nine calls; **whole**: eager time of the model at these sizes over
  that of `moe_mlir.compile`'s.
- Where scores tie, experts are chosen by a rule of ours; `--ties` prints how often it matters
  ([A router of your own](OwnRouter.md)).
- **no**: could not be had; a line above says why.
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_mlir.models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--output", help="the file to write; default: standard output")
    parser.add_argument("--ties", action="store_true",
                        help="print how often the best experts are not determined, instead")
    options = parser.parse_args(arguments)
    if options.ties:
        print(ties.table(), end="")
        return 0
    unknown = [name for name in options.names if name not in FAMILIES]
    if unknown:
        parser.error(f"expected names of {', '.join(FAMILIES)}, found {', '.join(unknown)}")
    _be_quiet()
    rows = []
    section = "" if options.output is None else page.read(options.output)[1]
    for name in options.names or FAMILIES:
        rows.append(measure(name, FAMILIES[name], _progress))
        if options.output is not None:
            # After each model, so that an interruption loses one row.
            page.write(options.output, _text(rows), section)
    if options.output is None:
        print(_text(rows), end="")
    return 0 if all(row.recognised == row.expected for row in rows) else 1


def _progress(text):
    print(text, file=sys.stderr, flush=True)


def _text(rows) -> str:
    return _head() + "".join(map(_row, rows)) + _reasons(rows) + _TAIL


def _be_quiet():
    """transformers warns about sizes of tiny models."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)


def _head():
    import transformers

    machine = f"one thread of {platform.machine()}"
    return _HEAD.format(transformers=transformers.__version__, machine=machine,
                        torch=torch.__version__)


def _row(row) -> str:
    def number(value, form):
        return "no" if value is None else format(value, form)
    cells = (row.name, row.form, f"{row.recognised} of {row.expected}", number(row.lines, "d"),
             number(row.compile_seconds, ".1f"), number(row.error, ".1e"),
             number(row.training_error, ".1e"), number(row.router_speedup, ".1f"),
             number(row.whole_speedup, ".2f"))
    return f"| {' | '.join(cells)} |\n"


def _reasons(rows) -> str:
    lines = [f"- {row.name}: {row.reason}\n" for row in rows if row.reason]
    return "".join(["\n", *lines]) if lines else ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["decisions"]:
        from .decisions import main as compare_decisions

        sys.exit(compare_decisions(sys.argv[2:]))
    if sys.argv[1:2] == ["generate"]:
        from .generation import main as measure_generation

        sys.exit(measure_generation(sys.argv[2:]))
    if "--speed" in sys.argv[1:]:
        from .speed import main as measure_speed

        sys.exit(measure_speed([x for x in sys.argv[1:] if x != "--speed"]))
    sys.exit(main(sys.argv[1:]))
