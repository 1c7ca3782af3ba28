"""transformers' caches, as inputs of a program.

A program takes tensors. A `StaticCache` among a model's inputs is taken apart
(`cache_state`) into what the program updates in place, and put together again
around the tensors of a trace. One that grows: `growing_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .cache_state import CacheTensors, is_cache, parts_of
from .first_tokens import (
    counters_are_known,
    counters_of,
    first_tokens,
    is_counter,
    is_whole,
)
from .growing_cache import grows, take_apart_growing
from .token_inputs import token_count


def take_apart(cache: Any, model: torch.nn.Module | None, values: Mapping[Any, Any]) -> CacheTensors:
    """A cache among the inputs of a model; one of fixed size gets its tensors if it has none yet.

    Raises:
        TypeError: a cache that no program can take.
    """
    if grows(cache):
        return take_apart_growing(cache)
    parts = CacheTensors.of(cache, is_counter)
    if is_whole(parts):
        return parts
    are_known = counters_are_known(cache)
    added = first_tokens(parts, model, values)
    if are_known and not added.changes:
        return parts
    added.prepare(cache)
    return CacheTensors.of(cache, is_counter)


def flatten_caches(values: dict, model: torch.nn.Module | None) -> dict:
    """Inputs by name with caches as their tensors."""
    if not any(map(is_cache, values.values())):
        return values
    parts = {name: take_apart(value, model, values) if is_cache(value) else value
             for name, value in values.items()}
    tokens = token_count(values, model)
    for part in caches_of(parts):
        if not part.form.grows:
            _require_room(part.cache, tokens)
    return parts


def unfit_for_fixed_size(model: Any) -> str | None:
    """Why a model of transformers cannot generate with a cache of fixed size; None if it can."""
    import transformers

    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "a part of it is as long as the encoder's input"
    try:
        cache = transformers.StaticCache(config=config, max_cache_len=4)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
        take_apart(cache, model, {0: ids})
    except Exception as error:  # of the model's own code, or ours, which say what they cannot do
        return str(error) or type(error).__name__
    return None


def unfit_for_static_generate(model: Any) -> str | None:
    """Why `generate` of transformers cannot run a model with a cache of fixed size; None if it can."""
    if _has_wrong_window_masks(model.config):
        return "generate makes the mask of full attention for its layers with a window"
    return unfit_for_fixed_size(model)


def _has_wrong_window_masks(config) -> bool:
    """A fault of transformers for layers that are "hybrid_sliding" (docs/UpstreamFaults.md)."""
    from transformers import masking_utils

    functions = getattr(masking_utils, "LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING", {})
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    masks = [functions.get(kind) for kind in set(kinds)]
    return any(mask.get("sliding_attention") is masking_utils.create_causal_mask
               for mask in masks if isinstance(mask, dict))


def caches_of(values: dict) -> list[CacheTensors]:
    return [value for value in values.values() if isinstance(value, CacheTensors)]


def _require_room(cache, tokens: int) -> None:
    """Raises where so many more tokens have no place: compiled code checks no position."""
    for _, layer in _layers_with_places(cache):
        for held in map(int, _counts(layer)):
            if _is_window(layer):
                # A window moves on: its count of places is at most that of all tokens.
                if held > layer.cumulative_length_int:
                    raise ValueError(
                        f"expected the layers of a cache to have one count of tokens, found {held} "
                        f"and {layer.cumulative_length_int}; call the cache's reset()")
            elif held + tokens > layer.max_cache_len:
                room = layer.max_cache_len
                raise ValueError(
                    f"expected at most {room - held} tokens, which the cache of {room} has room for "
                    f"beside the {held} that it holds, found {tokens}; make a StaticCache with a "
                    "larger max_cache_len, or call its reset()")


def _layers_with_places(cache):
    """The layers that store each token at a position, by their paths."""
    return ((("layers", i), layer) for i, layer in enumerate(cache.layers)
            if hasattr(layer, "max_cache_len"))


def _is_window(layer):
    return hasattr(layer, "cumulative_length_int")


def _counts(layer):
    """The tensors in which a layer counts tokens."""
    return (value for name, value in vars(layer).items()
            if name.endswith("cumulative_length") and isinstance(value, torch.Tensor))


def part_kinds(cache: Any) -> list[tuple[type, tuple[str, ...]]]:
    """A cache as `GuardedCalls.add_part` has its classes described, with their counters."""
    return [(type(part), tuple(path[0] for path in counters_of(type(part)) if len(path) == 1))
            for part in (cache, *parts_of(cache))]


def limits_of(parts: CacheTensors, tokens: int) -> list[tuple[torch.Tensor, int, int | None]]:
    """The tensors that count tokens, and the most that each may be before so many more.

    That of a window is at most a counter of the cache, whose number comes last.
    """
    numbers = {path: number for number, group in enumerate(parts.form.counters) for path in group}
    return [(value, getattr(layer, "max_cache_len", 0) - tokens,
             numbers.get((*path, "cumulative_length_int")) if _is_window(layer) else None)
            for path, layer in _layers_with_places(parts.cache) for value in _counts(layer)]
