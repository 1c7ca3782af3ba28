"""What a cache is between calls, beside the values of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .._transformers.cache_state import (
    SMALLEST_SIZE,
    CacheForm,
    CacheTensors,
    Path,
    ResultNumber,
    SizeText,
    Structure,
    leaves_of,
    put,
)
from .._transformers.first_tokens import is_counter
from .._transformers.growing_cache import take_apart_growing
from ..gpu.sizes import evaluate_text

Shape = tuple[int, ...]


class State(NamedTuple):
    """What a cache is at a time.

    Attributes:
        form: a number for all flags and other constants; of a cache that grows, for its tensors, too.
        counters: the integers that grow with the tokens, in order.
        shapes: of a cache that grows those of its tensors, in order.
    """

    form: int
    counters: tuple[int, ...]
    shapes: tuple[Shape, ...] = ()


class CacheStates:
    """The states in which one cache can be.

    Attributes:
        initial: the state of the cache as it was given.
        first: the tensors that it had.
    """

    def __init__(self, cache: Any, grows: bool = False):
        self._grows = grows
        self._forms: list[CacheForm] = []
        parts = take_apart_growing(cache) if grows else CacheTensors.of(cache, is_counter)
        self.first = parts.state
        self.initial = self._state_of(cache)

    def form(self, number: int) -> CacheForm:
        """What the states of a form have in common; each counter is a group of its own."""
        return self._forms[number]

    def at(self, state: State) -> CacheTensors:
        """The cache in a state, taken apart; the values of tensors that grow are of no matter."""
        form, cache = self._forms[state.form], self._cache_in(state, "cpu")
        # A trace may have found more counters since.
        known = {path for path, in form.counters}
        places = {(id(part), path[start:]) for path, (part, start), _ in leaves_of(cache) if path in known}
        return CacheTensors.of(cache, lambda part, path: (id(part), path) in places, self._grows)

    def after(self, state: State, changes: list[tuple[Path, Any]], sizes: Mapping[str, int],
              results: list[tuple[torch.dtype, tuple[int | str, ...]]]) -> State:
        """The state that a call makes of one, by what it changes.

        Args:
            sizes: the open sizes of the call by name.
            results: the types of the tensors that it makes.
        """
        cache = self._cache_in(state, "meta")
        made = [torch.empty([evaluate_text(size, dict(sizes)) for size in shape], dtype=dtype, device="meta")
                for dtype, shape in results]
        for path, value in changes:
            if isinstance(value, Structure):
                value.give(cache)
            elif isinstance(value, ResultNumber):
                put(cache, path, made[value])
            else:
                put(cache, path, evaluate_text(value, dict(sizes)) if isinstance(value, SizeText) else value)
        return self._state_of(cache)

    def _cache_in(self, state, device) -> Any:
        """A cache of a state; on the device "meta" its tensors have no memory, unless they are fixed."""
        form = self._forms[state.form]
        tensors = self.first
        if self._grows:
            tensors = [torch.zeros(shape, dtype=dtype, device=device)
                       for shape, (dtype, _) in zip(state.shapes, form.kinds, strict=True)]
        counts = [torch.empty(count + SMALLEST_SIZE, 0) for count in state.counters]
        return CacheTensors(form, [*tensors, *counts]).build()

    def _state_of(self, cache) -> State:
        parts = CacheTensors.of(cache, is_counter, self._grows)
        counters = {path: leaf for path, (part, start), leaf in leaves_of(cache)
                    if type(leaf) is int and is_counter(part, path[start:])}
        form = dataclasses.replace(parts.form, counters=tuple((path,) for path in counters))
        if form not in self._forms:
            self._forms.append(form)
        shapes = tuple(tuple(tensor.shape) for tensor in parts.state) if self._grows else ()
        return State(self._forms.index(form), tuple(counters.values()), shapes)


__all__ = ["CacheStates", "Shape", "State"]
