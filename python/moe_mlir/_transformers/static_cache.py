"""transformers' caches of keys and values that have a fixed size, as inputs of a program.

A program takes tensors. A `StaticCache` among a model's inputs is taken apart
into the tensors of its layers, which the program updates in place, and put
together again around the tensors of a trace.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch.core import pytree
from .names import LAYER_TENSORS, head_shapes


@dataclass(frozen=True)
class CacheForm:
    """What two caches have in common whose tensors have the same places."""

    kind: type
    lengths: tuple[int, ...]
    # The cache and its layers without their tensors.
    frame: Any = field(compare=False, repr=False)


class CacheTensors:
    """A cache as its tensors, in the order of its layers."""

    # Of its tensors the one that counts the tokens held.
    length_index = LAYER_TENSORS.index("cumulative_length")

    def __init__(self, form: CacheForm, tensors: list, cache: Any = None):
        self.form, self.tensors, self.cache = form, tensors, cache

    @staticmethod
    def of(cache: Any, model: torch.nn.Module | None, batch: int) -> CacheTensors:
        """A given cache, whose tensors are made if it has none yet."""
        _require_fixed_size(cache)
        if not all(layer.is_initialized for layer in cache.layers):
            _initialize(cache, model, batch)
        frame = copy.copy(cache)
        frame.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in frame.layers:
            for name in LAYER_TENSORS:
                setattr(layer, name, None)
        form = CacheForm(type(cache), tuple(layer.max_cache_len for layer in cache.layers), frame)
        return CacheTensors(form, _tensors_of(cache), cache)

    def build(self) -> Any:
        """A cache around these tensors."""
        cache, tensors = copy.copy(self.form.frame), iter(self.tensors)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            for name in LAYER_TENSORS:
                setattr(layer, name, next(tensors))
        return cache

    @property
    def held(self) -> torch.Tensor:
        """The number of tokens that it holds."""
        return self.tensors[self.length_index]

    @property
    def room(self) -> int:
        """The number of tokens that it can hold."""
        return self.form.lengths[0]

    def require_room(self, tokens: int) -> None:
        """Raises where so many more tokens have no place: compiled code checks no position."""
        held, room = int(self.held), self.room
        if held + tokens > room:
            raise ValueError(f"expected at most {room - held} tokens, which the cache of {room} "
                             f"has room for beside the {held} that it holds, found {tokens}; make "
                             "a StaticCache with a larger max_cache_len, or call its reset()")


def _tensors_of(cache):
    return [getattr(layer, name) for layer in cache.layers for name in LAYER_TENSORS]


def _names(form):
    return [f"layers.{i}.{name}" for i in range(len(form.lengths)) for name in LAYER_TENSORS]


pytree.register_pytree_node(
    CacheTensors, lambda parts: (parts.tensors, parts.form),
    lambda tensors, form: CacheTensors(form, list(tensors)),
    flatten_with_keys_fn=lambda parts: (
        [(pytree.MappingKey(n), t) for n, t in zip(_names(parts.form), parts.tensors)], parts.form))


def is_cache(value: object) -> bool:
    """Whether it is a cache of transformers, which is imported then."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def flatten_caches(values: dict, model: torch.nn.Module | None) -> dict:
    """Inputs by name with caches as their tensors."""
    if not any(map(is_cache, values.values())):
        return values
    tokens = _tokens(values, model)
    batch = 1 if tokens is None else tokens.shape[0]
    parts = {name: CacheTensors.of(value, model, batch) if is_cache(value) else value
             for name, value in values.items()}
    for part in caches_of(parts):
        part.require_room(token_count(values, model))
    return parts


# The inputs that a decoder reads tokens from, as transformers names them; what a cache belongs to
# is the decoder, where there is an encoder as well.
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
# Parts of the names of inputs that have other dims.
_NO_TOKENS = ("mask", "position", "bias", "encoder", "labels")


def _tokens(values: Mapping[Any, Any], model: torch.nn.Module | None) -> torch.Tensor | None:
    """The input whose dims are sequences and tokens, ids or activations.

    That is one of a known name, or the first of two dims and more in the order of the model's
    signature; callers give keywords in any order.
    """
    named = _in_order_of_signature(values, model)
    for name in (*_TOKENS, getattr(model, "main_input_name", None)):
        tokens = named.get(name)
        if isinstance(tokens, torch.Tensor) and tokens.dim() >= 2:
            return tokens
    return next((x for name, x in named.items() if isinstance(x, torch.Tensor) and x.dim() >= 2
                 and not any(part in str(name) for part in _NO_TOKENS)), None)


def _in_order_of_signature(values, model):
    """Inputs by name, of which those that were given by position have numbers."""
    parameters = [] if model is None else list(inspect.signature(model.forward).parameters)
    named = {parameters[n] if isinstance(n, int) and n < len(parameters) else n: x
             for n, x in values.items()}
    order = [name for name in parameters if name in named]
    return {name: named[name] for name in (*order, *named)}


def token_count(values: Mapping[Any, Any], model: torch.nn.Module | None) -> int:
    """The tokens that a call adds to a cache; raises if its positions are of another number."""
    tokens = _tokens(values, model)
    count = 1 if tokens is None else tokens.shape[1]
    positions = values.get("cache_position")
    if isinstance(positions, torch.Tensor) and positions.dim() == 1 and len(positions) != count:
        raise ValueError(f"expected 'cache_position' to have the places of {count} tokens, found "
                         f"{len(positions)}")
    return count


def layered_type(cache: Any) -> tuple:
    """A cache of fixed size as `GuardedCalls.add_layered` has it described."""
    from transformers.cache_utils import StaticLayer

    return type(cache), "layers", StaticLayer, LAYER_TENSORS, ("max_cache_len", "is_initialized")


def caches_of(values: dict) -> list[CacheTensors]:
    return [value for value in values.values() if isinstance(value, CacheTensors)]


def _require_fixed_size(cache) -> None:
    from transformers.cache_utils import StaticLayer

    kinds = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not StaticLayer})
    if kinds or not cache.layers:
        raise TypeError(
            "expected a cache of fixed size, transformers.StaticCache(config=model.config, "
            f"max_cache_len=..), found a {type(cache).__name__} with layers {kinds}, which has no "
            "one shape; to generate with it, use model.compile(backend=\"moe\", dynamic=True)")


def _initialize(cache, model, batch) -> None:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError("expected a StaticCache with tensors, found one that no model has written "
                         "to; call its early_initialization(..)")
    weight = next(model.parameters())
    heads, width = head_shapes(config)
    cache.early_initialization(batch, heads, width, weight.dtype, weight.device)
