"""A language model as what a decoder calls: ids and a cache in, the logits of the last token out."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .._transformers.names import cache_call


class LastLogits(torch.nn.Module):
    """Ids [sequences, tokens] and a cache -> logits f32 [sequences, words]."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        known = inspect.signature(model.forward).parameters
        wanted: dict[str, Any] = dict(use_cache=True, logits_to_keep=1)
        self._options = {name: value for name, value in wanted.items() if name in known}
        self.eval()

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        outputs = self.model(ids, **self._options, **cache_call(self.model, cache))
        return outputs.logits[:, -1].float()


def name_in_model(name: str) -> str:
    """Of a weight of `LastLogits` its name in the model."""
    return name.removeprefix("model.")


__all__ = ["LastLogits", "name_in_model"]
