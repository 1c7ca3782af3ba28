"""What a cache is between calls, beside the values of its tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._transformers.cache_state import CacheTensors, Path, leaves_of, put
from .._transformers.first_tokens import is_counter


class State(NamedTuple):
    """A number for all flags and other constants of a cache, and its counters in order."""

    form: int
    counters: tuple[int, ...]


class CacheStates:
    """The states in which one cache can be.

    Attributes:
        counters: the paths of the integers that grow with the tokens.
        initial: the state of the cache as it was given.
    """

    def __init__(self, cache: Any):
        self._cache = cache
        self._forms: list[tuple[tuple[Path, type, Any], ...]] = []
        self.counters = tuple(_counters_in(cache))
        self.initial = self._now()

    def at(self, state: State) -> CacheTensors:
        """The cache in a state, taken apart."""
        self._enter(state)
        return CacheTensors.of(self._cache, is_counter)

    def after(self, state: State, constants: list[tuple[Path, Any]],
              counters: dict[Path, int]) -> State:
        """The state that a call makes of one, by what it changes.

        Raises:
            TypeError: the cache keeps other integers then.
        """
        self._enter(state)
        for path, value in (*constants, *counters.items()):
            put(self._cache, path, value)
        return self._now()

    def _enter(self, state):
        for path, _, value in self._forms[state.form]:
            put(self._cache, path, value)
        for path, value in zip(self.counters, state.counters, strict=True):
            put(self._cache, path, value)

    def _now(self) -> State:
        found = _counters_in(self._cache)
        if tuple(found) != self.counters:
            raise TypeError(
                "expected a cache that counts tokens in the same integers before and after a call, "
                f"found {_dotted(set(found) ^ set(self.counters))} in one of them alone; no artifact "
                "can keep it")
        constants = CacheTensors.of(self._cache, is_counter).form.constants
        if constants not in self._forms:
            self._forms.append(constants)
        return State(self._forms.index(constants), tuple(found.values()))


def _counters_in(cache) -> dict[Path, int]:
    return {path: leaf for path, (part, start), leaf in leaves_of(cache)
            if type(leaf) is int and is_counter(part, path[start:])}


def _dotted(paths) -> str:
    return ", ".join(repr(".".join(map(str, path))) for path in sorted(paths, key=str))


__all__ = ["CacheStates", "State"]
