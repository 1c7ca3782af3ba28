"""squeeze, with a question whether each size is 1.

Of open sizes torch takes a trace's squeeze for one that leaves them, and notes nothing: its program
has a dim more than eager code where a size is 1.
"""

import torch
from torch.overrides import TorchFunctionMode

_SQUEEZES = frozenset({torch.squeeze, torch.squeeze_copy, torch.Tensor.squeeze, torch.Tensor.squeeze_})


class SqueezeAsksSizes(TorchFunctionMode):
    """The answers are conditions of the program, as those to `x.shape[1] == 1` are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _SQUEEZES:
            _ask(*args, **kwargs)
        return function(*args, **kwargs)


def _ask(input, dim=None, **others):
    """Whether the dims that may go have size 1; torch refuses what is no dim."""
    dims = range(input.dim()) if dim is None else dim if isinstance(dim, (tuple, list)) else [dim]
    for d in dims:
        if isinstance(d, int) and -input.dim() <= d < input.dim():
            bool(input.shape[d] == 1)
