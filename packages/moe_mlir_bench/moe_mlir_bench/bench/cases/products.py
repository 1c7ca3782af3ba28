"""Products of an imported model, x [m, k] by a constant weight [n, k], beside torch's own.

With `packed` the weight was packed once, by `moe_mlir.pack_linears`; without, it is read
where it lies and becomes panels in each call.
"""

import copy
import functools
from typing import Any

import torch

import moe_mlir

from ..rows import Case, Goal, assert_within, normal

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

# Why goals are missed, for the page.
_WHY_UNPACKED = (
    "The weight becomes panels in each call: with AVX2 22 % of the time of 16 rows and 7 % of 64 "
    "and of 256, which packed weights save.")
_WHY_PACKED = (
    "The limit is that of multiply-adds. Reading the weight from memory once is a third of it for "
    "16 rows and a tenth for 64.")


def product(
    m: int, n: int, k: int, dtype: torch.dtype, packed: bool = False, **options: Any,
) -> Case:
    @functools.cache
    def layer():
        linear = torch.nn.Linear(k, n, bias=False, dtype=dtype)
        linear.weight.copy_(normal(n, k, seed=1) / k**0.5)
        return linear.requires_grad_(False)

    @functools.cache
    def compiled():
        model = layer()
        if packed:
            model = copy.deepcopy(model)
            moe_mlir.pack_linears(model)
        return moe_mlir.compile(model, inputs(0), pack=False)

    def inputs(seed):
        return (normal(m, k, seed=seed, dtype=dtype),)

    def check(values, y):
        (x,) = values
        few = slice(None, None, max(1, m // 64))
        expected = x[few].double() @ layer().weight.double().T
        assert_within(y[few], expected, _TOLERANCE[dtype] * float(expected.abs().max()), "y")

    of_peak = (Goal("percent_of_limit", 85),) if dtype == torch.float32 else ()
    return Case(
        op="product",
        shape=dict(m=m, n=n, k=k) | ({"packed": True} if packed else {}),
        dtype=dtype,
        inputs=inputs,
        ours=lambda x: compiled()(x),
        eager=lambda x: torch.mm(x, layer().weight.T),
        flops=2 * m * n * k,
        moved=dtype.itemsize * (m * k + n * k + m * n),
        check=check,
        goals=(Goal("eager_ratio", 1.0), *of_peak),
        why=_WHY_PACKED if packed else _WHY_UNPACKED,
        **options,
    )


_SHAPES = (*((n, n, n) for n in (256, 512, 1024, 2048, 4096)),
           *((m, 1024, 1024) for m in (16, 64, 4096)))

ROWS = [
    product(*shape, dtype, packed, quick=max(shape) <= 1024, more_rounds=10)
    for packed in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
    for shape in _SHAPES
]
