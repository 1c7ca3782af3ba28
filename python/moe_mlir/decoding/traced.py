"""One program of a decoder: on which states of the cache, and for how many tokens, it runs."""

from __future__ import annotations

from collections.abc import Sequence

from .._transformers.cache_state import SMALLEST_SIZE, CacheForm, Path, SizeText
from ..frontends.export import Module
from ..gpu.sizes import RELATIONS, evaluate_text, linear_in, names_in, unmet_condition
from .states import CacheStates, State

# Names of the inputs of what is traced.
IDS, CACHE = "ids", "cache"


class TracedProgram:
    """A module that was traced for a cache in one state, with what it serves.

    Attributes:
        module: the program, of the inputs IDS and CACHE.
        form: of the states that it serves.
        next_form: of the states that its calls lead to.
        groups: of each input that says counters its position and their numbers; they are equal.
        changes: the counters that a call changes, and what they are then, over sizes.
    """

    def __init__(self, module: Module, states: CacheStates, state: State, form: CacheForm):
        self.module, self._states, self.form = module, states, state.form
        number_of = {path: number for number, path in enumerate(states.counters)}
        positions = {argument.name: position for position, argument
                     in enumerate(module.program.arguments) if argument.kind == "input"}
        self.ids = positions[IDS]
        self.groups = [(positions[f"{CACHE}.{name}"], [number_of[path] for path in group])
                       for name, group in zip(form.counter_names, form.counters, strict=True)]
        changes, = module.cache_changes
        self.changes = {number_of[path]: value for path, value in changes if path in number_of}
        self._constants = [(path, value) for path, value in changes if path not in number_of]
        for path, value in self._constants:
            _require_constant(path, value)
        self._symbols = self._open_sizes()
        self.next_form = states.after(state, self._constants, {}).form

    def _open_sizes(self) -> list[tuple[str | int, int | None]]:
        """Of each size that a call chooses its text, and the counter that it says, or None for
        the number of tokens."""
        arguments = self.module.program.arguments
        return [(arguments[self.ids].shape[1], None),
                *((arguments[position].shape[0], group[0]) for position, group in self.groups)]

    def _values(self, state: State, tokens: int) -> dict[str, int] | None:
        """The open sizes by name in a call; None where the program has other sizes."""
        given = [(text, tokens if counter is None else state.counters[counter] + SMALLEST_SIZE)
                 for text, counter in self._symbols]
        values = {text: size for text, size in given
                  if isinstance(text, str) and text in self.module.program.symbols}
        if any(evaluate_text(text, values) != size for text, size in given):
            return None
        return values

    @property
    def serves_many(self) -> bool:
        """Whether it serves other numbers of tokens than that of its trace."""
        return not isinstance(self._symbols[0][0], int)

    def serves(self, state: State, tokens: int) -> bool:
        """Whether it runs for so many tokens of each sequence on a cache in a state."""
        if state.form != self.form or any(
                len({state.counters[number] for number in group}) > 1 for _, group in self.groups):
            return False
        values = self._values(state, tokens)
        return values is not None and unmet_condition(self.module.conditions, values) is None

    def most_tokens(self, state: State, tokens: int, most: int) -> int:
        """The largest number up to which it serves each one from `tokens`, which it serves."""
        values = self._values(state, tokens)
        assert values is not None
        name = self._symbols[0][0]
        if not isinstance(name, str) or name not in values:
            return tokens
        relevant = [(text, relation, number) for text, relation, number in self.module.conditions
                    if name in names_in(text)]
        is_shared = any(name in names_in(text) for text, _ in self._symbols[1:])
        if is_shared:
            return tokens
        for text, relation, number in relevant:
            linear = linear_in(text, name, values)
            if linear is None:
                # Each number is looked at by itself.
                return tokens
            most = min(most, _last(*linear, relation, number, tokens, most))
        return most

    def after(self, state: State, tokens: int) -> State:
        """The state of the cache after a call that it serves."""
        values = self._values(state, tokens)
        assert values is not None
        counters = list(state.counters)
        for number, value in self.changes.items():
            counters[number] = evaluate_text(value, values)
        return State(self.next_form, tuple(counters))


def _require_constant(path: Path, value) -> None:
    if isinstance(value, SizeText):
        raise TypeError(
            f"expected a cache whose integers grow with the tokens of every call or stay, found "
            f"'{'.'.join(map(str, path))}', which a call sets to {value}; no artifact can keep it")


def _last(factor: int, rest: int, relation: str, number: int, now: int, most: int) -> int:
    """The largest x in [now, most] up to which `factor * x + rest <relation> number` holds."""
    def holds(x):
        return RELATIONS[relation](factor * x + rest, number)
    if factor == 0 or (relation != "!=" and holds(most)):
        return most
    if relation == "!=":
        other, remainder = divmod(number - rest, factor)
        return other - 1 if remainder == 0 and now < other <= most else most
    if relation == "==":
        return now
    low, high = now, most  # holds at low and not at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def counter_classes(programs: Sequence[TracedProgram], initial: State) -> list[list[int]]:
    """The counters, those together that are one in all programs."""
    classes: dict[tuple, list[int]] = {}
    for number, first in enumerate(initial.counters):
        places = tuple(next((place for place, group in program.groups if number in group), None)
                       for program in programs)
        changes = tuple(program.changes.get(number) for program in programs)
        classes.setdefault((first, places, changes), []).append(number)
    return list(classes.values())


__all__ = ["CACHE", "IDS", "TracedProgram", "counter_classes"]
