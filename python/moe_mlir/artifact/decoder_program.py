"""One way in which a decoder runs: code for some numbers of tokens, on a cache in some states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from ..gpu.sizes import RELATIONS, evaluate_text, names_in, unmet_condition
from . import weights_file
from .arguments import require_kind
from .functions import ArtifactFunction

# How much larger a size is than the counter that it says.
_SMALLEST_SIZE = 2


class DecoderState(NamedTuple):
    """What a cache is, beside its tensors: a number for its flags, and counters of tokens."""

    form: int
    counters: tuple[int, ...]


def refuse(expectation: str) -> NoReturn:
    raise ValueError(f"decoder.json: expected {expectation}")


class DecoderProgram:
    """A function with its weights bound; ids, counters and the tensors of a cache come with a call.

    Attributes:
        words: the number of logits of a token.
    """

    def __init__(self, description: Mapping[str, Any], function: ArtifactFunction,
                 stored: Mapping[str, Any], state: Mapping[str, tuple[str, list[int]]],
                 initial: DecoderState, sequences: int):
        self._function, self._sequences = function, sequences
        self._form, self._next_form = description["form"], description["next_form"]
        self._arguments = description["arguments"]
        self._symbols, self._conditions = description["symbols"], description["conditions"]
        self._changes = description["changes"]
        if len(self._arguments) != len(function.arguments):
            self._refuse(f"{len(function.arguments)} arguments, found {len(self._arguments)}")
        self._weights: dict[int, Any] = {}
        self._state: dict[int, str] = {}
        self._counters: dict[int, list[int]] = {}
        self._ids: list[int] = []
        for position, argument in enumerate(self._arguments):
            self._read_argument(position, argument, stored, state, len(initial.counters))
        if len(self._ids) != 1:
            self._refuse(f"one argument for ids, found {len(self._ids)}")
        self._require_sizes(len(initial.counters))
        # All others have the sizes that the function says, in every call.
        self._open = [position for position, argument in enumerate(self._arguments)
                      if position in self._ids or position in self._counters
                      or argument["shape"] != function.arguments[position].get("shape", [])]
        self.words = self._read_words()

    @property
    def state(self) -> list[str]:
        """The names of the tensors of the cache that it uses."""
        return list(self._state.values())

    def _refuse(self, expectation) -> NoReturn:
        raise ValueError(f"decoder.json: '{self._function.name}': expected {expectation}")

    def _read_argument(self, position, argument, stored, state, count) -> None:
        kind, name, expected = argument["kind"], argument["name"], self._function.arguments[position]
        sizes = expected.get("shape", [])
        if expected.get("updated") and kind != "state":
            self._refuse(f"'{name}', which it updates, to be state, found {kind}")
        if len(argument["shape"]) != len(sizes):
            self._refuse(f"{len(sizes)} sizes of '{name}', found {len(argument['shape'])}")
        if kind == "weight":
            self._weights[position] = weights_file.find(stored, argument["stored_as"])
            require_kind(f"decoder.json: '{name}'", self._weights[position], expected)
        elif kind == "state":
            if state.get(name) != (expected["dtype"], sizes):
                self._refuse(f"state '{name}' to be {expected['dtype']} {sizes}, found "
                             f"{state.get(name)}")
            self._state[position] = name
        elif kind == "counter":
            counters = argument["counters"]
            if sizes[1:] != [0] or not counters or not all(
                    type(counter) is int and 0 <= counter < count for counter in counters):
                self._refuse(f"an empty tensor for some of {count} counters, found {counters}")
            self._counters[position] = counters
        elif kind == "ids":
            if expected["dtype"] != "i64" or len(sizes) != 2 or sizes[0] not in (-1, self._sequences):
                self._refuse(f"ids of {self._sequences} sequences, found {expected}")
            self._ids.append(position)
        else:
            self._refuse(f"an argument that is a weight, state, a counter or ids, found {kind}")

    def _require_sizes(self, count) -> None:
        for name, (position, dim) in self._symbols.items():
            if position not in range(len(self._arguments)) or \
                    dim not in range(len(self._arguments[position]["shape"])):
                self._refuse(f"'{name}' to stand for a size of an argument")
        for text, relation, number in self._conditions:
            if relation not in RELATIONS or type(number) is not int:
                self._refuse(f"conditions such as ['s0', '>=', 2], found [{text!r}, {relation!r}, "
                             f"{number!r}]")
        counters = [counter for counter, _ in self._changes]
        texts = [*(text for _, text in self._changes), *(text for text, *_ in self._conditions),
                 *(size for argument in self._arguments for size in argument["shape"])]
        names = {name for text in texts for name in names_in(text)}
        if not names <= self._symbols.keys() or not all(
                type(counter) is int and 0 <= counter < count for counter in counters):
            self._refuse(f"changes of its {count} counters by sizes of its arguments, found others")

    def _read_words(self) -> int:
        results = self._function.results
        shape = results[0].get("shape", []) if len(results) == 1 else []
        if len(shape) != 2 or results[0]["dtype"] != "f32" or \
                shape[0] not in (-1, self._sequences) or shape[1] < 1:
            self._refuse(f"logits of {self._sequences} sequences as its one result, found {results}")
        return shape[1]

    # ---- calls -----------------------------------------------------------------------

    def sizes_of(self, state: DecoderState, tokens: int) -> dict[str, int] | None:
        """The sizes by name in a call; None where the program does not serve it."""
        if state.form != self._form or any(
                len({state.counters[counter] for counter in counters}) > 1
                for counters in self._counters.values()):
            return None
        symbols = {name: self._shape(position, state, tokens)[dim]
                   for name, (position, dim) in self._symbols.items()}
        if unmet_condition(self._conditions, symbols) is not None:
            return None
        for position in self._open:
            sizes = [evaluate_text(size, symbols) for size in self._arguments[position]["shape"]]
            if sizes != self._shape(position, state, tokens):
                return None
        return symbols

    def _shape(self, position, state, tokens) -> list[int]:
        if position in self._counters:
            return [state.counters[self._counters[position][0]] + _SMALLEST_SIZE, 0]
        if position in self._ids:
            return [self._sequences, tokens]
        return list(self._function.arguments[position]["shape"])

    def after(self, state: DecoderState, symbols: dict[str, int]) -> DecoderState:
        """The state after a call with these sizes."""
        counters = list(state.counters)
        for counter, text in self._changes:
            counters[counter] = evaluate_text(text, symbols)
            if counters[counter] < 0:
                self._refuse(f"counters of at least 0 after a call, found {counters[counter]}")
        return DecoderState(self._next_form, tuple(counters))

    def allocate(self, ids: Any, out: Any) -> Any:
        """Memory for the logits, or the caller's."""
        shape = [self._sequences, self.words]
        if out is None:
            return self._function.allocate(0, shape, [ids])
        self._function.require_place(0, out, shape)
        return out

    def run(self, ids: Any, state: DecoderState, values: Mapping[str, Any], logits: Any) -> None:
        """Writes the logits, and the values of the state."""
        arguments: list[Any] = []
        for position in range(len(self._arguments)):
            if position in self._weights:
                arguments.append(self._weights[position])
            elif position in self._state:
                arguments.append(values[self._state[position]])
            elif position in self._counters:
                arguments.append(weights_file.zeros(self._shape(position, state, 0), "float32"))
            else:
                arguments.append(ids)
        self._function.require_relations(arguments)
        self._function.run(arguments, [logits])


__all__ = ["DecoderProgram", "DecoderState", "refuse"]
