"""moe.token_rows: the token of each row of the experts (docs/Spec.md 3.14)."""

import torch

from ._check import INDICES, Checker
from ._kernel import Kernel, Tensor, contiguous, kernels
from ._library import define

_check = Checker("token_rows")


def token_rows(slots: torch.Tensor) -> torch.Tensor:
    """The token of each row, the inverse of `dispatch`'s slots.

    Args:
        slots: `[tokens, k]` int32 or int64; a slot that is no row has none.

    Returns:
        `[tokens * k]` int64; 0 for a row that no assignment has.
    """
    return _op(slots)


def _arguments(slots):
    _check.tensor("slots", slots)
    return (slots,)


def _validate(slots):
    if slots.dim() != 2:
        _check.fail(f"slots: expected 2 dims [tokens, k], found {slots.dim()}")
    _check.dtype("slots", slots, INDICES)


@kernels
def kernel(k: int, slot_dtype: torch.dtype) -> Kernel:
    return Kernel("token_rows", (Tensor("slots", ("n", k), slot_dtype),),
                  (Tensor("rows", (("n", k),), torch.int64),))


def _run(slots):
    _validate(slots)
    (rows,) = kernel(slots.shape[1], slots.dtype)(contiguous(slots))
    return rows


def _fake(slots):
    _validate(slots)
    return slots.new_empty((slots.shape[0] * slots.shape[1],), dtype=torch.int64)


_op = define("token_rows(Tensor slots) -> Tensor", arguments=_arguments, kernel=_run, fake=_fake,
             key="CompositeExplicitAutograd")
