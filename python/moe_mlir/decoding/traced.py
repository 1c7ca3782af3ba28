"""One program of a decoder: on which states of the cache, and for how many tokens, it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._transformers.cache_state import SMALLEST_SIZE, CacheForm, Path, SizeText
from ..frontends.export import Module
from ..gpu.sizes import RELATIONS, evaluate_text, linear_in, names_in
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
        self._holds = _compiled(module.conditions)
        self._linear = self._linear_conditions()
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
        if any(values[text] != size if text in values else evaluate_text(text, values) != size
               for text, size in given):
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
        return values is not None and self._holds(values)

    def most_tokens(self, state: State, tokens: int, most: int) -> int:
        """The largest number up to which it serves each one from `tokens`, which it serves; that
        number itself where no more can be said."""
        if self._linear is None:
            return tokens
        values, name = self._values(state, tokens), self._symbols[0][0]
        assert values is not None and isinstance(name, str)
        for text, relation, number in self._linear:
            linear = linear_in(text, name, values)
            assert linear is not None
            most = min(most, _last(*linear, relation, number, tokens, most))
        return most

    def _linear_conditions(self) -> list[tuple[str, str, int]] | None:
        """The conditions on the number of tokens; None unless that is an open size by itself, in
        which all are linear."""
        name, names = self._symbols[0][0], dict.fromkeys(self.module.program.symbols, 1)
        if name not in names or any(name in names_in(text) for text, _ in self._symbols[1:]):
            return None
        found = [condition for condition in self.module.conditions if name in names_in(condition[0])]
        return None if any(linear_in(text, str(name), names) is None for text, *_ in found) else found

    def after(self, state: State, tokens: int) -> State:
        """The state of the cache after a call that it serves."""
        values = self._values(state, tokens)
        assert values is not None
        counters = list(state.counters)
        for number, value in self.changes.items():
            counters[number] = evaluate_text(value, values)
        return State(self.next_form, tuple(counters))


def _compiled(conditions) -> Callable[[dict[str, int]], bool]:
    """Whether all conditions hold, as a function of the open sizes by name.

    A search looks at each number of tokens, of which there are thousands. The texts are those of a
    trace in this process: those of a file are evaluated by `gpu.sizes`, which runs no code.
    """
    text = " and ".join(f"({size}) {relation} {number}" for size, relation, number in conditions)
    code = compile(text or "True", "<conditions>", "eval")
    return lambda values: eval(code, {"max": max, "min": min}, values)


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
