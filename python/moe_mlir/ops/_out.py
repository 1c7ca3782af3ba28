"""Results that go to tensors of the caller: `out=` of a few ops."""

from collections.abc import Sequence
from typing import Any

import torch

from ._check import Checker
from ._plain_calls import are_plain


def can_write(
    check: Checker, args: Sequence[Any], out: Sequence[torch.Tensor], shape: Sequence[int],
    dtypes: Sequence[torch.dtype], dims: str,
) -> bool:
    """Whether a kernel can write its results to `out`, of this shape, instead of a copy of them.

    It cannot where something observes the call, where memory is not contiguous, or where it is an
    operand's, too.

    Raises:
        TypeError, ValueError: tensors of other shapes, dtypes or devices.
        RuntimeError: something in the call needs a gradient, as torch refuses.
    """
    operands = [x for x in args if isinstance(x, torch.Tensor)]
    for tensor, dtype in zip(out, dtypes, strict=True):
        check.tensor("out", tensor)
        check.dtype("out", tensor, (dtype,))
        check.shape("out", tensor, shape, dims)
        if tensor.device != operands[0].device:
            check.fail(f"expected 'out' on {operands[0].device}, found {tensor.device}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*operands, *out)):
        check.fail("expected no tensor that needs a gradient with 'out', found one; call it in "
                   "torch.no_grad()", RuntimeError)
    if torch.compiler.is_dynamo_compiling() or not are_plain((*args, *out)):
        return False
    memory = {x.untyped_storage().data_ptr() for x in operands}
    return all(x.is_contiguous() and x.untyped_storage().data_ptr() not in memory for x in out)


def pair(check: Checker, out: Any, names: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` of an op with two results."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        found = f"{len(out)} of them" if isinstance(out, (tuple, list)) else type(out).__name__
        check.fail(f"expected 'out' to be two tensors, {names}, found {found}", TypeError)
    return out[0], out[1]


def copy(
    out: tuple[torch.Tensor, torch.Tensor], results: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    for mine, result in zip(out, results):
        mine.copy_(result)
    return out
