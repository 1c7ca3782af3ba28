"""One program of a decoder: on which states of the cache, and for how many tokens, it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._transformers.cache_state import SMALLEST_SIZE, CacheTensors, Path, ResultNumber, SizeText
from ..frontends.export import Module
from ..gpu.sizes import RELATIONS, evaluate_text, linear_in, names_in
from ..importer.program import Result
from .states import CacheStates, State

# Names of the inputs of what is traced.
IDS, CACHE = "ids", "cache"
# A size, as a program has it: a number, or a text over its open sizes.
Size = int | str


class _Next(NamedTuple):
    """What a program's calls make of a state: each counter and shape is another, or that of a
    number before the call."""

    form: int
    counters: list[tuple[Size | None, int]]
    shapes: list[tuple[tuple[Size, ...] | None, int]]


class TracedProgram:
    """A module that was traced for a call, with what it serves.

    Attributes:
        module: the program, of the inputs IDS and CACHE.
        form: of the states that it serves.
        groups: of each input that says counters its position and their paths; they are equal.
        changes: the counters that a call changes, and what they are then, over sizes.
        made: the tensors that a call makes, in the order of its results: their names in the cache.
    """

    def __init__(self, module: Module, states: CacheStates, state: State, tokens: int,
                 sequences: int, parts: CacheTensors):
        self.module, self._states, self.form = module, states, state.form
        self._sequences = sequences
        positions = {argument.name: position for position, argument
                     in enumerate(module.program.arguments) if argument.kind == "input"}
        self.ids = positions[IDS]
        self.groups = [(positions[f"{CACHE}.{name}"], group) for name, group
                       in zip(parts.form.counter_names, parts.form.counters, strict=True)]
        form = states.form(self.form)
        self._number_of = {path: number for number, (path,) in enumerate(form.counters)}
        self._sizes = self._open_sizes([positions[f"{CACHE}.{name}"] for name in form.tensor_names]
                                       if form.grows else [])
        self._holds = _compiled(module.conditions)
        self._linear = self._linear_conditions()
        self.changes: dict[Path, Size] = {}
        self.made: list[tuple[str, Result]] = []
        # A program that does not serve the call that it was traced for serves none.
        self._next = self._find_next(state, tokens) if self.serves(state, tokens) else None

    def _open_sizes(self, tensors) -> list[Size]:
        """The sizes that differ between calls, in the order of `_sizes_of`."""
        arguments = self.module.program.arguments
        return [*reversed(arguments[self.ids].shape),
                *(arguments[position].shape[0] for position, _ in self.groups),
                *(size for position in tensors for size in arguments[position].shape)]

    def _sizes_of(self, state: State, tokens: int) -> list[int]:
        return [tokens, self._sequences,
                *(state.counters[self._number_of[group[0]]] + SMALLEST_SIZE for _, group in self.groups),
                *(size for shape in state.shapes for size in shape)]

    def _values(self, state: State, tokens: int) -> dict[str, int] | None:
        """The open sizes by name in a call; None where the program has other sizes."""
        given = list(zip(self._sizes, self._sizes_of(state, tokens), strict=True))
        values = {text: size for text, size in given
                  if isinstance(text, str) and text in self.module.program.symbols}
        if any(values[text] != size if text in values else evaluate_text(text, values) != size
               for text, size in given):
            return None
        return values

    def _find_next(self, state, tokens) -> _Next:
        """What calls make of states, by the one that it was traced for."""
        (changes,), (count,) = self.module.cache_changes, self.module.cache_results
        changed, program = dict(changes), self.module.program
        results = [program.results[number] for _, number in program.outputs[len(program.outputs) - count:]]
        values = self._values(state, tokens)
        assert values is not None
        after = self._states.after(state, changes, values, [(r.dtype, r.shape) for r in results])
        before, form = (self._states.form(number) for number in (state.form, after.form))
        counters: list[tuple[Size | None, int]] = []
        for (path,), value in zip(form.counters, after.counters, strict=True):
            if path not in changed and path in self._number_of:
                counters.append((None, self._number_of[path]))
                continue
            # One that the form before takes for a constant is this number.
            self.changes[path] = changed.get(path, value)
            counters.append((self.changes[path], 0))
        for path, value in changes:
            _require_counter(path, value, self.changes)
        names: dict[int, str] = {}
        shapes: list[tuple[tuple[Size, ...] | None, int]] = []
        for path, name in zip(form.tensors, form.tensor_names, strict=True):
            number = changed.get(path)
            if isinstance(number, ResultNumber):
                names[number] = f"{CACHE}.{name}"
                shapes.append((results[number].shape, 0))
            else:
                _require_tensor(path, before.tensors)
                shapes.append((None, before.tensors.index(path)))
        self.made = [(names[number], result) for number, result in enumerate(results)]
        return _Next(after.form, counters, shapes if form.grows else [])

    @property
    def next_form(self) -> int:
        """Of the states that its calls lead to."""
        assert self._next is not None
        return self._next.form

    @property
    def serves_many(self) -> bool:
        """Whether it serves other numbers of tokens than that of its trace."""
        return not isinstance(self._sizes[0], int)

    def serves(self, state: State, tokens: int) -> bool:
        """Whether it runs for so many tokens of each sequence on a cache in a state."""
        if state.form != self.form or any(
                len({state.counters[self._number_of[path]] for path in group}) > 1
                for _, group in self.groups):
            return False
        values = self._values(state, tokens)
        return values is not None and self._holds(values)

    def most_tokens(self, state: State, tokens: int, most: int) -> int:
        """The largest number up to which it serves each one from `tokens`, which it serves; that
        number itself where no more can be said."""
        if self._linear is None:
            return tokens
        values, name = self._values(state, tokens), self._sizes[0]
        assert values is not None and isinstance(name, str)
        for text, relation, number in self._linear:
            linear = linear_in(text, name, values)
            assert linear is not None
            most = min(most, _last(*linear, relation, number, tokens, most))
        return most

    def _linear_conditions(self) -> list[tuple[str, str, int]] | None:
        """The conditions on the number of tokens; None unless that is an open size by itself, in
        which all are linear."""
        name, names = self._sizes[0], dict.fromkeys(self.module.program.symbols, 1)
        if name not in names or any(name in names_in(text) for text in self._sizes[1:]):
            return None
        found = [condition for condition in self.module.conditions if name in names_in(condition[0])]
        return None if any(linear_in(text, str(name), names) is None for text, *_ in found) else found

    def after(self, state: State, tokens: int) -> State:
        """The state of the cache after a call that it serves."""
        values = self._values(state, tokens)
        assert values is not None and self._next is not None
        form, counters, shapes = self._next
        return State(
            form,
            tuple(state.counters[number] if text is None else evaluate_text(text, values)
                  for text, number in counters),
            tuple(state.shapes[number] if texts is None else
                  tuple(evaluate_text(text, values) for text in texts) for texts, number in shapes))


def _compiled(conditions) -> Callable[[dict[str, int]], bool]:
    """Whether all conditions hold, as a function of the open sizes by name.

    A search looks at each number of tokens, of which there are thousands. The texts are those of a
    trace in this process: those of a file are evaluated by `gpu.sizes`, which runs no code.
    """
    text = " and ".join(f"({size}) {relation} {number}" for size, relation, number in conditions)
    code = compile(text or "True", "<conditions>", "eval")
    return lambda values: eval(code, {"max": max, "min": min}, values)


def _require_counter(path: Path, value, counters) -> None:
    if isinstance(value, SizeText) and path not in counters:
        raise TypeError(
            f"expected a cache whose integers grow with the tokens of every call or stay, found "
            f"'{'.'.join(map(str, path))}', which a call sets to {value}; no artifact can keep it")


def _require_tensor(path: Path, tensors) -> None:
    if path not in tensors:
        raise TypeError(
            f"expected a cache whose tensors stay where they are or are made anew by a call, found "
            f"one that moves to '{'.'.join(map(str, path))}'; no artifact can keep it")


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


def counter_classes(programs: Sequence[TracedProgram], initial: dict[Path, int]) -> list[list[Path]]:
    """The counters, those together that are one in all programs; `initial` is what they are at first."""
    classes: dict[tuple, list[Path]] = {}
    paths = dict.fromkeys([*initial, *(path for program in programs
                                       for group in [*(group for _, group in program.groups), program.changes]
                                       for path in group)])
    for path in paths:
        places = tuple(next((place for place, group in program.groups if path in group), None)
                       for program in programs)
        changes = tuple(program.changes.get(path) for program in programs)
        classes.setdefault((initial.get(path, 0), places, changes), []).append(path)
    return list(classes.values())


__all__ = ["CACHE", "IDS", "TracedProgram", "counter_classes"]
