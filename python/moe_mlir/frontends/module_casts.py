"""Casts of layers that change nothing, in a trace.

Routers of Switch and NLLB-MoE run `self.classifier = self.classifier.to(self.dtype)` in each call.
torch.export gives a layer weights without memory of their own, which `Module.to` cannot swap, even
for the dtype that they have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def casts_without_effect() -> Iterator[None]:
    """Lets `Module.to` in the block return a layer as it is that has what is asked for."""
    original = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        wanted = (*args, *kwargs.values())
        return self if _has_all(self, wanted) else original(self, *args, **kwargs)
    torch.nn.Module.to = to
    try:
        yield
    finally:
        torch.nn.Module.to = original


def _has_all(module, wanted) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    return all(_has(tensor, what) for what in wanted for tensor in tensors)


def _has(tensor, what) -> bool:
    """Whether `Module.to` of this argument leaves the tensor as it is."""
    if isinstance(what, torch.dtype):
        return not tensor.is_floating_point() or tensor.dtype == what
    return isinstance(what, (str, torch.device)) and tensor.device == torch.device(what)


__all__ = ["casts_without_effect"]
