"""Which input of a model of transformers has the tokens, and how many a call adds to a cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

# The inputs that a decoder reads tokens from, as transformers names them; what a cache belongs to
# is the decoder, where there is an encoder as well.
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
# Parts of the names of inputs that have other dims.
_NO_TOKENS = ("mask", "position", "bias", "encoder", "labels")


def tokens_of(values: Mapping[Any, Any], model: torch.nn.Module | None) -> torch.Tensor | None:
    """The input whose dims are sequences and tokens, ids or activations."""
    named = in_order_of_signature(values, model)
    return named.get(name_of_tokens(named, model))


def name_of_tokens(named, model):
    """The name of that input among all in the order of the model's signature.

    That is a known one, or that of the first of two dims and more; callers give keywords in any
    order.
    """
    for name in (*_TOKENS, getattr(model, "main_input_name", None)):
        tokens = named.get(name)
        if isinstance(tokens, torch.Tensor) and tokens.dim() >= 2:
            return name
    return next((name for name, x in named.items() if isinstance(x, torch.Tensor) and x.dim() >= 2
                 and not any(part in str(name) for part in _NO_TOKENS)), None)


def in_order_of_signature(values, model):
    """Inputs by name, of which those that were given by position have numbers."""
    parameters = [] if model is None else list(inspect.signature(model.forward).parameters)
    named = {parameters[n] if isinstance(n, int) and n < len(parameters) else n: x
             for n, x in values.items()}
    order = [name for name in parameters if name in named]
    return {name: named[name] for name in (*order, *named)}




def token_count(values: Mapping[Any, Any], model: torch.nn.Module | None) -> int:
    """The tokens that a call adds to a cache; raises if its positions are of another number."""
    tokens = tokens_of(values, model)
    count = 1 if tokens is None else tokens.shape[1]
    positions = values.get("cache_position")
    if isinstance(positions, torch.Tensor) and positions.dim() == 1 and len(positions) != count:
        raise ValueError(f"expected 'cache_position' to have the places of {count} tokens, found "
                         f"{len(positions)}")
    return count
