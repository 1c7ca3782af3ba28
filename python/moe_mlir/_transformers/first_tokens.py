"""What the first tokens add to a cache: tensors, and what the layers note of them.

Neither a model's configuration nor an empty cache says it. Of latent attention (DeepSeek, GLM)
keys and values differ in width; convolutions keep as many tokens as they are wide. So the model
runs for two tokens, once for caches of one form; the disk cache keeps what that told. The same run
shows which integers of a layer grow with the tokens.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .._torch.core import pytree
from ..guards.model_entries import ModelEntry
from .cache_state import CacheForm, CacheTensors, Path, is_cache, leaves_of, parts_of, put
from .names import cache_call, head_shapes
from .token_inputs import in_order_of_signature, name_of_tokens, tokens_of

# Of a kind of layer the paths of its integers that grow with the tokens.
_COUNTERS: dict[type, frozenset[Path]] = {}


def counters_of(kind: type) -> frozenset[Path]:
    return _COUNTERS.get(kind, frozenset())


def is_known(kind: type) -> bool:
    """Whether it was asked which integers of such layers grow."""
    return kind in _COUNTERS


def add_counters(kind: type, paths: Iterable[Path]) -> None:
    _COUNTERS[kind] = counters_of(kind) | frozenset(paths)


def is_counter(part: Any, path: Path) -> bool:
    return path in counters_of(type(part))


def counters_are_known(cache: Any) -> bool:
    return all(type(layer) in _COUNTERS or type(layer).__name__ == "StaticLayer"
               for layer in parts_of(cache))


def is_whole(parts: CacheTensors) -> bool:
    """Whether a cache surely has all its tensors, and its layers are of kinds that were seen."""
    return counters_are_known(parts.cache) and not any(
        path[0] == "layers" and (value is None or value is False)
        for path, _, value in parts.form.constants)


class _Zeros(NamedTuple):
    """A tensor that a layer makes by itself."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class FirstTokens:
    """What the first tokens change in a cache, but for what it stores of them."""

    def __init__(self, changes: list[tuple[Path, Any]]):
        self.changes = changes

    def prepare(self, cache: Any) -> None:
        """Makes the tensors of a cache that has none, as the model would."""
        for path, value in self.changes:
            if isinstance(value, _Zeros):
                value = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
            put(cache, path, value)


_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, FirstTokens]] = \
    weakref.WeakKeyDictionary()


def first_tokens(parts: CacheTensors, model: torch.nn.Module | None,
                values: Mapping[Any, Any]) -> FirstTokens:
    """What the first tokens of a model add to a cache of this form."""
    config, tokens = getattr(model, "config", None), tokens_of(values, model)
    if config is None:
        raise ValueError("expected a StaticCache with tensors, found one that no model has written "
                         "to; call its early_initialization(..)")
    # Raises where transformers is too old for caches in compiled code.
    heads, width = head_shapes(config)
    assert model is not None
    weight = next(model.parameters())
    if tokens is None:
        parts.cache.early_initialization(1, heads, width, weight.dtype, weight.device)
        return FirstTokens([])
    known = _KNOWN.setdefault(model, {})
    sort = (tokens.shape[0], weight.dtype, weight.device)
    found = known.get((parts.form, *sort))
    if found is None:
        found, forms = _load_or_ask(model, values, parts)
        # Counters that are known now are no part of the form.
        form = CacheTensors.of(parts.cache, is_counter).form
        known.update({(whole, *sort): FirstTokens([]) for whole in forms} | {(form, *sort): found})
    return found


class _Asked(NamedTuple):
    """What two runs of a model told.

    Attributes:
        counters: of each kind of layer the paths of the integers that a token changed.
        forms: those of caches to which the first tokens add nothing more.
    """

    first_tokens: FirstTokens
    counters: dict[type, frozenset[Path]]
    forms: list[CacheForm]


def _load_or_ask(model, values, parts) -> tuple[FirstTokens, list[CacheForm]]:
    """What the first tokens add, and the forms of caches to which they add nothing more; from the
    disk cache where it has what the model told another process. The counters are known then."""
    given = {name: CacheTensors.of(value, is_counter).description if is_cache(value) else
             (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else value
             for name, value in values.items()}
    entry = ModelEntry("first tokens", model, parts.description, given)
    asked = entry.load()
    if asked is None:
        asked = _ask(model, values, parts.cache)
        # Weights are no part of the key, and a tensor may be made of them.
        if not any(isinstance(value, torch.Tensor) for _, value in asked.first_tokens.changes):
            entry.store(asked)
    else:
        _add_all_counters(asked.counters)
    return asked.first_tokens, asked.forms


def _add_all_counters(counters) -> None:
    for kind, paths in counters.items():
        add_counters(kind, paths)


def _ask(model, values, cache) -> _Asked:
    written = copy.deepcopy(cache)
    expected = _run_two_tokens(model, values, written)
    counters = _counters(cache, written)
    _add_all_counters(counters)
    whole = CacheTensors.of(written, is_counter).form
    found = FirstTokens(_added(cache, written))
    prepared = CacheTensors.of(written, is_counter).form
    if found.changes:
        _require_same(expected, _run_two_tokens(model, values, written))
    # Frames are caches, and no part of what is compared.
    return _Asked(found, counters, [replace(form, frame=None) for form in (whole, prepared)])


def _run_two_tokens(model, values, cache):
    """The outputs of a model for the first tokens of each sequence: of one nothing tells what a
    model takes for its place."""
    named = in_order_of_signature(values, model)
    name = name_of_tokens(named, model)
    others = {other: x for other, x in named.items() if other != name and not is_cache(x)
              and not any(part in str(other) for part in ("mask", "position", "bias", "labels"))}
    tokens = named[name]
    two = tokens[:, :2] if tokens.shape[1] > 1 else torch.cat((tokens, tokens), 1)
    room = min((layer.max_cache_len for layer in parts_of(cache) if hasattr(layer, "max_cache_len")),
               default=2)
    with torch.no_grad():
        return model(**others, **{name: two[:, :room]}, **cache_call(model, cache))


def _require_same(expected, found) -> None:
    """Raises where a model takes a cache that has tensors for one that holds tokens.

    So does Inkling of transformers 5.24: its positions are the cache's own count, which the call
    has raised by the time that they are read.
    """
    for one, other in zip(pytree.tree_leaves(expected), pytree.tree_leaves(found)):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            # Of one function on the same numbers, whose sums may differ in order.
            tolerance = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
            if not (one - other).abs().max() <= tolerance:
                raise TypeError(
                    "expected a model that gives the same for an empty cache whether it has tensors "
                    "or not, found other results, so that no compiled code can have both; to "
                    "generate with this model, use a transformers.DynamicCache(config=model.config)")


def _counters(before, after) -> dict[type, frozenset[Path]]:
    """Of each kind of layer the paths of the integers that a token changed."""
    old = {path: leaf for path, _, leaf in leaves_of(before)}
    counters: dict[type, set[Path]] = {type(layer): set() for layer in parts_of(before)}
    for path, (part, start), leaf in leaves_of(after):
        if type(leaf) is int and type(old.get(path)) is int and old[path] != leaf:
            counters.setdefault(type(part), set()).add(path[start:])
    return {kind: frozenset(paths) for kind, paths in counters.items()}


def _added(before, written) -> list[tuple[Path, Any]]:
    """The tensors that a model made in a cache, and what it noted of them."""
    old = {path: leaf for path, _, leaf in leaves_of(before)}
    made = {path: leaf for path, _, leaf in leaves_of(written)
            if isinstance(leaf, torch.Tensor) and not isinstance(old.get(path), torch.Tensor)}
    if not made:
        return []
    _require_own_memory({path: leaf for path, _, leaf in leaves_of(written)
                         if isinstance(leaf, torch.Tensor)})
    written.reset()
    added: list[tuple[Path, Any]] = []
    for path, (part, start), leaf in leaves_of(written):
        if path in made and leaf is None:
            raise TypeError(
                f"expected a cache whose reset() keeps its tensors, found none at '{_dotted(path)}' then; "
                "to generate with this model, use a transformers.DynamicCache(config=model.config)")
        if path in made:
            added.append((path, _Zeros(leaf.shape, leaf.dtype, leaf.device) if not leaf.any() else leaf))
        elif not isinstance(leaf, torch.Tensor) and not is_counter(part, path[start:]):
            if path not in old or type(old[path]) is not type(leaf) or old[path] != leaf:
                _require_unwritten(path, old.get(path))
                added.append((path, leaf))
    return added


def _require_own_memory(tensors) -> None:
    seen: dict[int, Path] = {}
    for path, tensor in tensors.items():
        other = seen.setdefault(tensor.untyped_storage().data_ptr(), path)
        if other is not path:
            raise TypeError(
                f"expected a cache whose tensors have memory of their own, found "
                f"'{_dotted(path)}' in that of '{_dotted(other)}'; to generate with this model, use "
                "a transformers.DynamicCache(config=model.config)")


def _require_unwritten(path, value) -> None:
    if value is True:
        raise TypeError(
            f"expected a cache that is empty, or that each layer has written to, found "
            f"'{_dotted(path)}' = True beside layers without tensors; call the cache's reset(), or "
            "fill it by a call of the model that is not compiled")


def _dotted(path):
    return ".".join(map(str, path))
