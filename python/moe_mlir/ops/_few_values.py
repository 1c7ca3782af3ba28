"""Floats that kernels hold as constants, as long as they have few values.

A constant costs nothing in a kernel, and a kernel has to be compiled for each:
right for the scale of a model, wrong for a temperature that falls in each step.
So the first few values of a form are constants, and all that come later share one
kernel, which takes the value as an operand, or whose operands or results are
scaled in torch. A value that was a constant once stays one.
"""

from collections.abc import Hashable

import torch

MOST_VALUES = 4
# Of a form that is not seen again nothing is worth knowing.
_MOST_FORMS = 4096


class FewValues:
    """The values of one float of an op that are constants of its kernels."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, set[float]] = {}

    def has(self, form: Hashable, value: float) -> bool:
        """Whether a kernel of this form, which is all else that it depends on, holds the value."""
        seen = self._seen.get(form)
        if seen is None:
            if len(self._seen) >= _MOST_FORMS:
                self._seen.clear()
            seen = self._seen.setdefault(form, set())
        if value in seen:
            return True
        if len(seen) >= MOST_VALUES:
            return False
        seen.add(value)
        return True


def scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """The value as a kernel takes it as an operand, where `like` is."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
