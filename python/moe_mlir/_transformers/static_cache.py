"""transformers' caches of keys and values that have a fixed size, as inputs of a program.

A program takes tensors. A `StaticCache` among a model's inputs is taken apart
into the tensors of its layers, which the program updates in place, and put
together again around the tensors of a trace.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .._torch.core import pytree
from .names import LAYER_TENSORS, cache_call, head_shapes


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
    def of(cache: Any, model: torch.nn.Module | None, values: Mapping[Any, Any]) -> CacheTensors:
        """A cache among the inputs of a model, whose tensors are made if it has none yet."""
        _require_fixed_size(cache)
        if not all(layer.is_initialized for layer in cache.layers):
            _initialize(cache, model, values)
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
    parts = {name: CacheTensors.of(value, model, values) if is_cache(value) else value
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
    """The input whose dims are sequences and tokens, ids or activations."""
    named = _in_order_of_signature(values, model)
    return named.get(_name_of_tokens(named, model))


def _name_of_tokens(named, model):
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


# ---- tensors of a cache that has none ------------------------------------------------


class _LayerShape(NamedTuple):
    """Heads, and widths of keys and values, which may differ, and their dtypes."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]


# Of models that were asked, by the dtype that they had.
_SHAPES: weakref.WeakKeyDictionary[torch.nn.Module, dict[torch.dtype, list[_LayerShape]]] = \
    weakref.WeakKeyDictionary()


def _initialize(cache, model, values) -> None:
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError("expected a StaticCache with tensors, found one that no model has written "
                         "to; call its early_initialization(..)")
    weight, tokens = next(model.parameters()), _tokens(values, model)
    # Raises where transformers is too old for caches in compiled code.
    heads, width = head_shapes(config)
    if tokens is None:
        cache.early_initialization(1, heads, width, weight.dtype, weight.device)
        return
    of_model = _SHAPES.setdefault(model, {})
    if len(of_model.get(weight.dtype, ())) != len(cache.layers):
        of_model[weight.dtype] = _shapes_of_a_token(cache, model, values)
    for layer, shape in zip(cache.layers, of_model[weight.dtype], strict=True):
        layer.lazy_initialization(*(
            torch.empty(tokens.shape[0], count, 1, width, dtype=dtype, device=weight.device)
            for count, width, dtype in zip(*shape)))


def _shapes_of_a_token(cache, model, values) -> list[_LayerShape]:
    """What a model writes to a cache, which its configuration alone does not say.

    Of latent attention (DeepSeek, GLM) keys and values differ in width, and not in all versions of
    transformers are they of the heads that the configuration has. So the model runs for one token.
    """
    named = _in_order_of_signature(values, model)
    name = _name_of_tokens(named, model)
    others = {other: x for other, x in named.items() if other != name and not is_cache(x)
              and not any(part in str(other) for part in ("mask", "position", "bias", "labels"))}
    written = copy.deepcopy(cache)
    with torch.no_grad():
        model(**others, **{name: named[name][:, :1]}, **cache_call(model, written))
    return [_LayerShape((layer.keys.shape[1], layer.values.shape[1]),
                        (layer.keys.shape[3], layer.values.shape[3]),
                        (layer.keys.dtype, layer.values.dtype)) for layer in written.layers]
