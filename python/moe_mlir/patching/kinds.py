"""What a graph takes for granted of a tensor."""

from typing import NamedTuple

import torch

# In shapes: a size that is open, of 2 and more.
OPEN = -1
# In shapes: the size that the first input has there, which is open: ids of tokens are as many.
TIED = -2


class Kind(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
