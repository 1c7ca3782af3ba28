"""The ops under torch.func: gradients, vmap, and what they refuse.

torch.library's own gradient of an op cannot be used by torch.func, which asks
for an autograd.Function with its context apart. Each op has one, which stands
where torch.func enters the dispatcher.
"""

import functools
from typing import Any

import torch
from torch.autograd import forward_ad

_KEY = "FuncTorchDynamicLayerFrontMode"


def register_transforms(library, op, setup_context, backward, around, rows):
    """`around` a call of the Function comes what must happen once for all transforms."""

    def refuse(ctx, *tangents):
        raise _no_forward_mode(op._opname)

    function: Any = type(
        op._opname,
        (torch.autograd.Function,),
        dict(
            forward=staticmethod(lambda *args: op(*args)),
            setup_context=staticmethod(setup_context),
            backward=staticmethod(backward),
            jvp=staticmethod(refuse),
            vmap=staticmethod(_vmap(op, rows)),
        ),
    )

    def apply(*args):
        # The dispatcher leaves out arguments that have their default.
        rest = op._schema.arguments[len(args):]
        return function.apply(*args, *(argument.default_value for argument in rest))

    library.impl(op._opname, around(apply), _KEY)


def _vmap(op, rows):
    """The op over a batch: by another leading dim where it has rows, else one by one."""
    names = [argument.name for argument in op._schema.arguments]
    places = {names.index(name) for name in rows}

    def vmap(info, in_dims, *args):
        batched = {n for n, dim in enumerate(in_dims) if dim is not None}
        if batched <= places:
            results = op(*(
                _lead(x, dim, info.batch_size) if n in places else x
                for n, (x, dim) in enumerate(zip(args, in_dims, strict=True))
            ))
        else:
            results = _one_by_one(op, info.batch_size, in_dims, args)
        return results, (0,) * len(results) if isinstance(results, tuple) else 0

    return vmap


def _lead(x, dim, size):
    """x with the batch as its first dim."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _one_by_one(op, size, in_dims, args):
    if size == 0:
        raise ValueError(f"{op._opname}: expected vmap over at least one element, found none")
    runs = [
        op(*(x if dim is None else x.select(dim, n) for x, dim in zip(args, in_dims, strict=True)))
        for n in range(size)
    ]
    if isinstance(runs[0], tuple):
        return tuple(map(torch.stack, zip(*runs, strict=True)))
    return torch.stack(runs)


# ---------------------------------------------------------------- forward mode


def refuse_tangents(name, kernel):
    """The kernel, which would lose the tangents of its arguments without a word."""

    @functools.wraps(kernel)
    def run(*args):
        if in_dual_level() and any(isinstance(x, torch.Tensor) and _has_tangent(x) for x in args):
            raise _no_forward_mode(name)
        return kernel(*args)

    return run


def in_dual_level():
    return forward_ad._current_level >= 0


def _has_tangent(x):
    return forward_ad.unpack_dual(x).tangent is not None


def _no_forward_mode(name):
    return NotImplementedError(
        f"{name}: expected no tangents, found forward-mode differentiation (jvp, jacfwd, dual "
        "tensors); use reverse mode (vjp, jacrev), or moe_mlir.reference for this op"
    )
