#!/usr/bin/env python3
"""Writes what each op supports into docs/Limits.md, by asking the registered ops.

    PYTHONPATH=build/python python utils/op_support.py [--write docs/Limits.md]

Types and gradients are tried on meta tensors, without a kernel. The GPU's columns are what the
tests run in the simulator: `moe_mlir_bench.gpu_check`'s cases of forwards and of gradients.
"""

import itertools
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python" / "ops"))

import op_calls  # noqa: E402

from moe_mlir import ops  # noqa: E402
from moe_mlir._support.page_table import PageTable  # noqa: E402
from moe_mlir_bench.gpu_check import cases, gradients  # noqa: E402

HEAD = ("op", "float32, bfloat16, float16", "float32 only", "gradient with respect to",
        "GPU forward", "GPU gradient")


def floating(name):
    """{argument: its place} of the floating tensors of an op's call."""
    schema = getattr(torch.ops.moe, name).default._schema
    call = op_calls.FORWARD_CALLS[name]
    return {argument.name: place for place, (argument, x) in enumerate(zip(schema.arguments, call))
            if isinstance(x, torch.Tensor) and x.is_floating_point()}


def results(name, narrow=(), grad=False):
    """(results of the op, its arguments) on meta tensors, some of them in bfloat16."""
    places = floating(name)
    call = [x.detach().to("meta") if isinstance(x, torch.Tensor) else x
            for x in op_calls.FORWARD_CALLS[name]]
    for argument, place in places.items():
        if argument in narrow:
            call[place] = call[place].bfloat16()
        call[place].requires_grad_(grad)
    return op_calls.run(name, call), call


def narrow_arguments(name):
    """The most arguments that may be in 16 bits at once; learnt scalars follow float32."""
    places = floating(name)
    matrices = [a for a, place in places.items() if op_calls.FORWARD_CALLS[name][place].dim()]
    for left_out in range(len(matrices)):
        for wide in itertools.combinations(matrices, left_out):
            narrow = [a for a in matrices if a not in wide]
            try:
                results(name, narrow)
            except (TypeError, ValueError):
                continue
            return narrow
    return []


def differentiated(name):
    """Arguments that get a gradient."""
    found, call = results(name, grad=True)
    outputs = [x for x in found if x.requires_grad]
    if not outputs:
        return []
    places = floating(name)
    grads = torch.autograd.grad(outputs, [call[place] for place in places.values()],
                                [torch.ones_like(x) for x in outputs], allow_unused=True)
    return [argument for argument, grad in zip(places, grads) if grad is not None]


class _Asked(Exception):
    pass


class _Recorder:
    """Stands for the package, to learn which op a case calls."""

    def __getattr__(self, name):
        raise _Asked(name)


def checked_gradients():
    """Ops whose gradient the tests run on the simulated GPU."""
    found = set()
    for call, values in gradients.CASES.values():
        try:
            call(_Recorder(), *values)
        except _Asked as asked:
            found.add(str(asked))
    return found


def table():
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    on_gpu = checked_gradients()
    for name in ops.__all__:
        narrow, grads = narrow_arguments(name), differentiated(name)
        wide = [a for a in floating(name) if a not in narrow]
        forward = "simulated" if name in cases.OPS else "no"
        backward = "simulated" if name in on_gpu else "composed" if grads else ""
        cells = (f"`{name}`", *(", ".join(f"`{a}`" for a in group) for group in (narrow, wide, grads)),
                 forward, backward)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLE = PageTable("python utils/op_support.py", table)
page_with_table = TABLE.on_page


if __name__ == "__main__":
    TABLE.run(__doc__.split("\n")[0])
