"""transformers' caches that grow, as inputs and results of a program.

A layer of a `DynamicCache` puts longer tensors in the place of its own. So a program takes the
tensors that a cache has, at open lengths, and returns those that it has then. Which lengths are
open, and which integers of a layer count tokens, the traces themselves say: what came out as a
symbol in one of them is open in the next. Before the first, an integer counts that is 0 in a layer
without tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from .cache_state import CacheTensors, Path, ResultNumber, SizeText, Structure, leaves_of, parts_of
from .first_tokens import add_counters, counters_of, is_counter, is_known
from .names import given_cache

# Of a kind of layer, by the path in it and the number of dims, those of its tensors whose sizes follow
# the tokens.
_OPEN_DIMS: dict[tuple[type, Path, int], frozenset[int]] = {}


def grows(cache: Any) -> bool:
    """Whether a cache has layers whose tensors grow, or none yet."""
    layers = [part for part in parts_of(cache) if hasattr(part, "is_compileable")]
    return not layers or not all(layer.is_compileable for layer in layers)


def take_apart_growing(cache: Any) -> CacheTensors:
    """A cache that grows, as the tensors that it has now."""
    unknown = [part for part in (cache, *parts_of(cache)) if not is_known(type(part))]
    if unknown:
        _add_first_counters(cache, unknown)
    return CacheTensors.of(cache, is_counter, grows=True)


def _add_first_counters(cache, unknown) -> None:
    """Of layers of kinds that were not seen the integers that are 0 where there are no tensors."""
    held: dict[int, list[tuple[Path, Any]]] = {}
    for path, (part, start), leaf in leaves_of(cache):
        held.setdefault(id(part), []).append((path[start:], leaf))
    for part in unknown:
        leaves = held.get(id(part), [])
        if not is_known(type(part)) and not any(_has_elements(leaf) for _, leaf in leaves):
            add_counters(type(part), (path for path, leaf in leaves if type(leaf) is int and leaf == 0))


def contents_of(cache: Any) -> tuple[list[tuple[Path, Any]], list[torch.Tensor]]:
    """What a model put in a cache that it made itself, as changes of an empty object, and the tensors."""
    return CacheTensors.of(Structure(cache).frame, is_counter, grows=True).changes_of(cache, is_new=True)


def learn(cache: Any, changes: Iterable[tuple[Path, Any]], results: list[torch.Tensor],
          before: CacheTensors | None) -> None:
    """Notes which sizes and integers of a cache's layers follow the tokens, from what a trace changed
    in one that was given, or made (`before` is None).

    Of a new cache, the changes name all integers: a symbol follows the tokens, a number may not.
    """
    changed = dict(changes)
    old = dict(zip(before.form.tensors, before.state)) if before is not None else {}
    follows = torch.SymInt if before is None else (int, torch.SymInt, SizeText)
    for path, (part, start), _ in leaves_of(cache):
        value = changed.get(path)
        if isinstance(value, ResultNumber):
            sizes = results[value].shape
            key = type(part), path[start:], len(sizes)
            # Of a single token, one of size 1 becomes one of size 2.
            was = old[path].shape if path in old and old[path].dim() == len(sizes) else sizes
            found = frozenset(d for d, (size, other) in enumerate(zip(sizes, was))
                              if isinstance(size, torch.SymInt) or _differ(size, other))
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


def _differ(size: int, other: int | torch.SymInt) -> bool:
    return not isinstance(other, torch.SymInt) and size != other


def empty_cache(model: Any, ids: torch.Tensor) -> Any:
    """A cache as a model makes one itself, without tokens.

    Raises:
        TypeError: the model makes none, of which another can be made.
    """
    with torch.no_grad():
        outputs = model(ids, use_cache=True)
    found = given_cache(outputs)
    if found is None:
        raise TypeError(f"expected a model that makes a cache for use_cache=True, found none in the "
                        f"outputs of {type(model).__name__}")
    wanted = inspect.signature(type(found)).parameters
    return type(found)(**(dict(config=model.config) if "config" in wanted else {}))


def _has_elements(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


__all__ = ["contents_of", "empty_cache", "grows", "learn", "open_dims", "take_apart_growing"]
