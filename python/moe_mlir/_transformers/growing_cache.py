"""transformers' caches that grow, as inputs and results of a program.

A layer of a `DynamicCache` puts longer tensors in the place of its own. So a program takes the
tensors that a cache has, at open lengths, and returns those that it has then. Which lengths are
open, and which integers of a layer count tokens, the traces themselves say: what came out as a
symbol in one of them is open in the next. Before the first, an integer counts that is 0 in a layer
without tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .cache_state import CacheTensors, Path, ResultNumber, Structure, leaves_of, parts_of
from .first_tokens import add_counters, counters_of, is_counter, is_known

# Of a kind of layer, by the path in it and the number of dims, those of its tensors whose sizes follow
# the tokens.
_OPEN_DIMS: dict[tuple[type, Path, int], frozenset[int]] = {}


def grows(cache: Any) -> bool:
    """Whether a cache has layers whose tensors grow, or none yet."""
    layers = [part for part in parts_of(cache) if hasattr(part, "is_compileable")]
    return not layers or not all(layer.is_compileable for layer in layers)


def take_apart_growing(cache: Any) -> CacheTensors:
    """A cache that grows, as the tensors that it has now."""
    held: dict[int, list[tuple[Path, Any]]] = {}
    for path, (part, start), leaf in leaves_of(cache):
        held.setdefault(id(part), []).append((path[start:], leaf))
    for part in (cache, *parts_of(cache)):
        leaves = held.get(id(part), [])
        if not is_known(type(part)) and not any(_has_elements(leaf) for _, leaf in leaves):
            add_counters(type(part), (path for path, leaf in leaves if type(leaf) is int and leaf == 0))
    return CacheTensors.of(cache, is_counter, grows=True)


def contents_of(cache: Any) -> tuple[list[tuple[Path, Any]], list[torch.Tensor]]:
    """What a model put in a cache that it made itself, as changes of an empty object, and the tensors."""
    return CacheTensors.of(Structure(cache).frame, is_counter, grows=True).changes_of(cache, is_new=True)


def learn(cache: Any, changes: Iterable[tuple[Path, Any]], results: list[torch.Tensor],
          is_new: bool = False) -> None:
    """Notes which sizes and integers of a cache's layers follow the tokens, from what a trace changed.

    Of a new cache, the changes name all integers: a symbol follows the tokens, a number may not.
    """
    changed = dict(changes)
    follows = torch.SymInt if is_new else (int, torch.SymInt)
    for path, (part, start), _ in leaves_of(cache):
        value = changed.get(path)
        if isinstance(value, ResultNumber):
            sizes = results[value].shape
            key = type(part), path[start:], len(sizes)
            found = frozenset(d for d, size in enumerate(sizes) if isinstance(size, torch.SymInt))
            _OPEN_DIMS[key] = _OPEN_DIMS.get(key, frozenset()) | found
        elif isinstance(value, follows) and not isinstance(value, bool):
            if path[start:] not in counters_of(type(part)):
                add_counters(type(part), [path[start:]])


def open_dims(parts: CacheTensors) -> list[list[int]]:
    """Of each tensor of a cache that grows the dims that stay open in a program.

    Sizes 0 and 1 are closed: torch takes them for cases of their own, without a guard. Of layers
    that no trace has seen, all dims between the sequences and the width may grow.
    """
    place = {path: (type(part), path[start:]) for path, (part, start), _ in leaves_of(parts.cache)}
    result = []
    for path, tensor in zip(parts.form.tensors, parts.state):
        known = _OPEN_DIMS.get((*place[path], tensor.dim()))
        inner = range(1, tensor.dim() - 1) if known is None else sorted(known - {0})
        result.append([d for d in inner if tensor.shape[d] > 1])
    return result


def _has_elements(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


__all__ = ["contents_of", "grows", "learn", "open_dims", "take_apart_growing"]
