"""One way in which a decoder runs: code for some numbers of tokens, on a cache in some states."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn

from ..gpu.sizes import RELATIONS, evaluate_expression, evaluate_text, names_in, unmet_condition
from . import weights_file
from .arguments import DTYPES, require_kind
from .functions import ArtifactFunction

# How much larger a size is than the counter that it says.
_SMALLEST_SIZE = 2


class DecoderState(NamedTuple):
    """What a cache is, beside the values of its tensors: a number for its flags, counters of tokens,
    and the shapes of its tensors by name."""

    form: int
    counters: tuple[int, ...]
    shapes: Mapping[str, list[int]]


def refuse(expectation: str) -> NoReturn:
    raise ValueError(f"decoder.json: expected {expectation}")


class DecoderProgram:
    """A function with its weights bound; ids, counters and the tensors of a cache come with a call.

    Args:
        types: the element type of each tensor of the cache.
        made: those of them that programs make anew, which have other sizes in each call.

    Attributes:
        words: the number of logits of a token.
    """

    def __init__(self, description: Mapping[str, Any], function: ArtifactFunction,
                 stored: Mapping[str, Any], types: Mapping[str, str], made: Collection[str],
                 initial: DecoderState, sequences: int):
        self._function, self._sequences = function, sequences
        self._form, self._next_form = description["form"], description["next_form"]
        self._arguments = description["arguments"]
        self._symbols, self._conditions = description["symbols"], description["conditions"]
        self._changes, self._makes = description["changes"], description.get("makes", [])
        if len(self._arguments) != len(function.arguments):
            self._refuse(f"{len(function.arguments)} arguments, found {len(self._arguments)}")
        self._weights: dict[int, Any] = {}
        self._state: dict[int, str] = {}
        self._counters: dict[int, list[int]] = {}
        self._ids: list[int] = []
        for position, argument in enumerate(self._arguments):
            self._read_argument(position, argument, stored, types, made, initial)
        if len(self._ids) != 1:
            self._refuse(f"one argument for ids, found {len(self._ids)}")
        self._require_sizes(len(initial.counters))
        # All others have the sizes that the function says, in every call.
        self._open = [position for position, argument in enumerate(self._arguments)
                      if position in self._ids or position in self._counters
                      or self._state.get(position) in made
                      or argument["shape"] != function.arguments[position].get("shape", [])]
        self.words = self._read_words()
        self._require_made(types, initial)

    @property
    def state(self) -> list[str]:
        """The names of the tensors of the cache that it uses or makes."""
        return [*self._state.values(), *(made["name"] for made in self._makes)]

    def _refuse(self, expectation) -> NoReturn:
        raise ValueError(f"decoder.json: '{self._function.name}': expected {expectation}")

    def _read_argument(self, position, argument, stored, types, made, initial) -> None:
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
            shape = initial.shapes.get(name, [])
            fits = len(shape) == len(sizes) if name in made else shape == sizes
            if types.get(name) != expected["dtype"] or not fits:
                self._refuse(f"state '{name}' to be {expected['dtype']} {sizes}, found "
                             f"{types.get(name)} {shape}")
            self._state[position] = name
        elif kind == "counter":
            counters, count = argument["counters"], len(initial.counters)
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
                 *(size for entry in (*self._arguments, *self._makes) for size in entry["shape"])]
        names = {name for text in texts for name in names_in(text)}
        if not names <= self._symbols.keys() or not all(
                type(counter) is int and 0 <= counter < count for counter in counters):
            self._refuse(f"changes of its {count} counters by sizes of its arguments, found others")

    def _read_words(self) -> int:
        results = self._function.results
        shape = results[0].get("shape", []) if len(results) == 1 + len(self._makes) else []
        if len(shape) != 2 or results[0]["dtype"] != "f32" or \
                shape[0] not in (-1, self._sequences) or shape[1] < 1:
            self._refuse(f"logits of {self._sequences} sequences and {len(self._makes)} tensors of the "
                         f"cache as its results, found {results}")
        return shape[1]

    def _require_made(self, types, initial) -> None:
        """The tensors that it makes: the code writes all of a result, whatever memory it is given."""
        for made, result in zip(self._makes, self._function.results[1:], strict=True):
            name, sizes = made["name"], result.get("shape", [])
            if types.get(name) != result["dtype"] or not \
                    len(initial.shapes[name]) == len(made["shape"]) == len(sizes) or \
                    None in result.get("sizes", [None]):
                self._refuse(f"a result for '{name}', which is {types.get(name)} of "
                             f"{len(made['shape'])} dims, of sizes that follow from those of arguments, "
                             f"found {result}")
        names = [made["name"] for made in self._makes]
        if len(set(names)) != len(names):
            self._refuse(f"each tensor of the cache once among its results, found {names}")

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
            if sizes != self._shape(position, state, tokens) or not _fit(
                    sizes, self._function.arguments[position].get("shape", [])):
                return None
        return symbols

    def _shape(self, position, state, tokens) -> list[int]:
        if position in self._counters:
            return [state.counters[self._counters[position][0]] + _SMALLEST_SIZE, 0]
        if position in self._ids:
            return [self._sequences, tokens]
        if position in self._state:
            return list(state.shapes[self._state[position]])
        return list(self._function.arguments[position]["shape"])

    def after(self, state: DecoderState, symbols: dict[str, int]) -> DecoderState:
        """The state after a call with these sizes."""
        counters = list(state.counters)
        for counter, text in self._changes:
            counters[counter] = evaluate_text(text, symbols)
            if counters[counter] < 0:
                self._refuse(f"counters of at least 0 after a call, found {counters[counter]}")
        shapes = dict(state.shapes)
        for made, result in zip(self._makes, self._function.results[1:]):
            shapes[made["name"]] = [evaluate_text(size, symbols) for size in made["shape"]]
            if min(shapes[made["name"]], default=0) < 0 or not _fit(shapes[made["name"]], result["shape"]):
                self._refuse(f"sizes {result['shape']} of '{made['name']}' after a call, found "
                             f"{shapes[made['name']]}")
        return DecoderState(self._next_form, tuple(counters), shapes)

    def allocate(self, ids: Any, out: Any) -> Any:
        """Memory for the logits, or the caller's."""
        shape = [self._sequences, self.words]
        if out is None:
            return self._function.allocate(0, shape, [ids])
        self._function.require_place(0, out, shape)
        return out

    def run(self, ids: Any, state: DecoderState, after: DecoderState, values: dict[str, Any],
            logits: Any) -> None:
        """Writes the logits, and the values of the state, which is `after` then."""
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
        made = self._allocate_made(after, arguments)
        self._function.run(arguments, [logits, *made.values()])
        values.update(made)

    def _allocate_made(self, after, arguments) -> dict[str, Any]:
        """Memory for the tensors that a call makes."""
        made = {}
        for result, entry in enumerate(self._makes, 1):
            name, description = entry["name"], self._function.results[result]
            sizes = [evaluate_expression(size, arguments) for size in description["sizes"]]
            if sizes != after.shapes[name]:
                self._refuse(f"sizes {sizes} of '{name}' after this call, found {after.shapes[name]}")
            made[name] = weights_file.zeros(sizes, DTYPES[description["dtype"]])
        return made


def _fit(sizes, declared) -> bool:
    """Whether sizes are those of a type, which may have any in the place of -1."""
    return len(sizes) == len(declared) and all(a in (-1, b) for a, b in zip(declared, sizes))


__all__ = ["DecoderProgram", "DecoderState", "refuse"]
