"""One comparison of a kernel with what it means, and the tensors of one that fails."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .target import Target, Text

# Elements of a tensor that go to the folder of failures.
_SAVED_ELEMENTS = 1 << 20


class Problem(Exception):
    """What is wrong with a case, and the arrays that show it."""

    def __init__(self, text: str, arrays: dict[str, np.ndarray] | None = None) -> None:
        super().__init__(text)
        self.arrays = arrays or {}


@dataclass(frozen=True)
class Case:
    """`call(*inputs)` on the GPU against `expect(*inputs)` in float64.

    `judge(inputs, found, tolerance)` takes the place of the comparison element by element
    where several answers are right; it returns what is wrong, or "". `limit` is in seconds.
    """

    name: str
    inputs: Callable
    call: Callable
    expect: Callable | None
    tolerance: float
    group: str = "once"
    chip: str | None = None
    judge: Callable | None = None
    # Begin one element past a multiple of 16 bytes.
    is_unaligned: bool = False
    # The reference needs a GPU to be quick.
    is_large: bool = False
    # What is run, where a rehearsal runs another one.
    module: Text | None = None
    limit: float = 20.0
    # Seconds on a GPU, for the plan.
    model: float = 0.5

    def run(self, target: Target) -> dict:
        """Raises Problem; a second run must give the same bits."""
        with target.active(self.chip):
            inputs = self.inputs()
            moved = [self._place(x, target.torch_device) for x in inputs]
            found, again = (_tuple(self.call(*moved)) for _ in range(2))
            target.synchronize()
            found, again = ([x.detach() for x in results] for results in (found, again))
        for i, (a, b) in enumerate(zip(found, again, strict=True)):
            if not torch.equal(_bits(a), _bits(b)):
                raise Problem(f"result {i} differs between two runs",
                              _arrays(inputs, first=a, second=b))
        self._compare(inputs if not self.is_large else moved, found)
        return {}

    def _place(self, x, device):
        x = x.to(device)
        if not self.is_unaligned or not x.is_floating_point():
            return x
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    def _compare(self, inputs, found):
        if not self.is_large:
            found = [x.cpu() for x in found]
        if self.judge:
            if text := self.judge(inputs, found, self.tolerance):
                raise Problem(text, _arrays(inputs, *found))
            return
        assert self.expect is not None, "a case has a judge or an expectation"
        expected = _tuple(self.expect(*(_wide(x) for x in inputs)))
        for i, (a, want) in enumerate(zip(found, expected, strict=True)):
            if text := difference(a, want, self.tolerance):
                raise Problem(f"result {i}: {text}", _arrays(inputs, found=a, expected=want))


def _tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _wide(x):
    return x.double() if x.is_floating_point() else x


def _bits(x):
    """NaNs equal themselves as integers."""
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]) \
        if x.is_floating_point() else x


def difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    if found.shape != expected.shape:
        return f"expected shape {list(expected.shape)}, found {list(found.shape)}"
    if not found.is_floating_point():
        wrong = int((found != expected).sum())
        return f"{wrong} of {found.numel()} integers differ" if wrong else ""
    if not torch.equal(found.isnan(), expected.isnan()):
        return "NaN in other places"
    wide = expected.double()
    # Infinities are equal or as wrong as can be.
    error = torch.where(found.double() == wide, 0.0, (found.double() - wide).abs())
    limit = tolerance * (1 + wide.nan_to_num(0, 0, 0).abs())
    worst = float((error.nan_to_num(0, torch.inf) / limit).max()) if error.numel() else 0
    return f"error is {worst:.2g} of the tolerance {tolerance:.2g}" if worst > 1 else ""


def _arrays(inputs, *results, **named) -> dict:
    """NumPy arrays by name; of a large tensor its first elements."""
    tensors = {f"input_{i}": x for i, x in enumerate(inputs)}
    tensors |= {f"result_{i}": x for i, x in enumerate(results)} | named
    return {name: _array(x) for name, x in tensors.items()}


def _array(x) -> np.ndarray:
    """As float32 where NumPy lacks the type: exact, since these have 16 bits."""
    x = x.detach()
    x = (x if x.numel() <= _SAVED_ELEMENTS else x.flatten()[:_SAVED_ELEMENTS]).cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
