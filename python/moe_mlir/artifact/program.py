"""A model of torch in an artifact: its weights and its state are bound to its function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from ..gpu.sizes import describe_condition, evaluate_text, unmet_condition
from . import weights_file
from .arguments import DTYPES, require_kind, require_no_alias
from .functions import ArtifactFunction
from .program_state import ProgramState


class ArtifactProgram:
    """The function of a torch program, with its weights bound.

    Buffers that the model updates in place are the state of this object: calls
    go on from where the last one ended, one at a time.
    """

    def __init__(self, files: Mapping[str, Any], functions: Mapping[str, ArtifactFunction]):
        description = json.loads(files["program.json"])
        self.name = description["function"]
        self.function = functions[self.name]
        self._arguments = description["arguments"]
        self._require_known_state(len(description["results"]), description["outputs"])
        # Code for a CPU writes the next values of state into the arguments, and has no results
        # for them.
        updates = {i: a["updated_by"] for i, a in enumerate(self._arguments) if "updated_by" in a}
        in_place = any(a.get("updated") for a in self.function.arguments)
        rest = [i for i in range(len(description["results"]))
                if not in_place or i not in updates.values()]
        self._results = [description["results"][i] for i in rest]
        self._outputs = [rest.index(i) for i in description["outputs"]]
        self._symbols = description["symbols"]
        self._conditions = description["conditions"]
        stored = weights_file.tensors_of(files[weights_file.NAME])
        self._weights = {"cpu": {a["name"]: _stored(stored, a) for a in self._arguments
                                 if a["kind"] != "input" and "updated_by" not in a}}
        self._require_weights()
        self._state = ProgramState(
            self.name, {i: None if in_place else result for i, result in updates.items()})
        for i in updates:
            self._state.add(i, _first_value(stored, self._arguments[i], self.function.arguments[i]))
        self.inputs = [a["name"] for a in self._arguments if a["kind"] == "input"]

    def _require_weights(self) -> None:
        """Kernels read as many weights as they were compiled for."""
        for argument, expected in zip(self._arguments, self.function.arguments, strict=True):
            if (weight := self._weights["cpu"].get(argument["name"])) is not None:
                require_kind(f"{weights_file.NAME}: '{argument['name']}'", weight, expected)

    def _require_known_state(self, results, outputs) -> None:
        """What the code writes must be state: weights cannot be written, inputs are the caller's."""
        in_place = any(a.get("updated") for a in self.function.arguments)
        for argument, compiled in zip(self._arguments, self.function.arguments, strict=True):
            name, update = argument["name"], argument.get("updated_by")
            if compiled.get("updated") and update is None:
                raise ValueError(f"program.json: expected '{name}' to be state, as '{self.name}' "
                                 "updates it")
            if update is not None and (
                    argument["kind"] == "input" or in_place != bool(compiled.get("updated"))
                    or update not in range(results) or update in outputs):
                raise ValueError(f"program.json: expected the next value of '{name}' to be a result "
                                 f"of its own, found result {update}")

    @property
    def has_state(self) -> bool:
        """Whether calls update buffers of the model, which `reset` puts back."""
        return bool(self._state)

    def reset(self) -> None:
        """Puts the buffers that calls update back to what they were when the artifact was loaded."""
        with self._state.acquired():
            self._state.reset()

    def __call__(self, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Runs the model on its tensor inputs, in the order of `inputs` or by name."""
        given = self._in_order(inputs, named)
        if not self._state:
            return self._run(given, out)
        with self._state.acquired():
            return self._run(given, out)

    def _run(self, given, out):
        arguments = self._bind(given)
        for argument, value, expected in zip(self._arguments, arguments, self.function.arguments):
            if argument["kind"] == "input":
                require_kind(f"input '{argument['name']}'", value, expected)
        sizes = self._check_sizes(arguments)
        results = self._places(arguments, sizes, out)
        with self._state.updated() if self._state else nullcontext():
            self.function.run(arguments, results)
        chosen = tuple(results[i] for i in self._outputs)
        return chosen[0] if len(chosen) == 1 else chosen

    def _bind(self, given) -> list:
        """The arguments of the function: inputs, weights and state."""
        device = _device_of(given)
        rest, weights, state = iter(given), self._weights_on(device), self._state.values(device)
        return [next(rest) if a["kind"] == "input"
                else state[i] if i in state else weights[a["name"]]
                for i, a in enumerate(self._arguments)]

    def _places(self, arguments, sizes, out) -> list:
        """Where the results of the function go; the caller may give places for those it gets."""
        taken = self._state.places()
        shapes = [[evaluate_text(size, sizes) for size in shape] for shape in self._results]
        rest = [i for i in range(len(shapes)) if i not in taken]
        if out is not None:
            out = list(out) if isinstance(out, (tuple, list)) else [out]
            if len(out) != len(rest):
                raise ValueError(f"expected {len(rest)} buffers as out= for '{self.name}', found "
                                 f"{len(out)}")
            for i, place in zip(rest, out):
                self.function.require_place(i, place, shapes[i])
            require_no_alias(self.name, arguments, out)
            taken.update(zip(rest, out))
        return [taken[i] if i in taken else self.function.allocate(i, shape, arguments)
                for i, shape in enumerate(shapes)]

    def _in_order(self, inputs, named) -> list:
        """The inputs in the order of the program."""
        by_name = {**dict(zip(self.inputs, inputs)), **named}
        if len(inputs) + len(named) != len(self.inputs) or by_name.keys() != set(self.inputs):
            raise TypeError(f"expected the inputs {self.inputs}, found {len(inputs)} positional and "
                            f"{sorted(named)}")
        return [by_name[name] for name in self.inputs]

    def _weights_on(self, device):
        """The weights on a device, copied there at the first call."""
        if device not in self._weights:
            self._weights[device] = {
                name: weight.to(device) for name, weight in self._weights["cpu"].items()}
        return self._weights[device]

    def __repr__(self):
        return f"<compiled torch program {self.name}({', '.join(self.inputs)})>"

    def _check_sizes(self, arguments) -> dict:
        """The sizes that the inputs have by their names in the program, if it was compiled for them."""
        sizes = {name: int(arguments[position].shape[dim])
                 for name, (position, dim) in self._symbols.items()}
        if unmet := unmet_condition(self._conditions, sizes):
            places = {name: (self._arguments[position]["name"], dim)
                      for name, (position, dim) in self._symbols.items()}
            described = describe_condition(unmet, sizes, places, "the program was exported")
            raise ValueError(f"{described}; export it with sizes that include this one, and compile "
                             "that")
        for argument, value in zip(self._arguments, arguments):
            for dim, size in enumerate(argument["shape"]):
                expected = evaluate_text(size, sizes)
                if expected != value.shape[dim]:
                    raise ValueError(
                        f"input '{argument['name']}': expected dim {dim} to be {expected}, which is "
                        f"'{size}' for the sizes of the inputs before, found {value.shape[dim]}")
        self.function.require_relations(arguments)
        return sizes


def _stored(tensors: Mapping[str, Any], argument: Mapping[str, Any]) -> Any:
    """The weight of an argument; tied ones are stored once, under the first one's name."""
    return weights_file.find(tensors, _stored_as(argument))


def _stored_as(argument: Mapping[str, Any]) -> str:
    return argument.get("stored_as", argument["name"])


def _first_value(stored, argument, expected) -> Any:
    """The first value of a buffer that calls update; one of zeros is not stored."""
    if argument.get("stored_as", "") is not None:
        return weights_file.first_value(stored, _stored_as(argument), argument["name"],
                                        expected["dtype"], expected["shape"], "program.json")
    return weights_file.zeros(expected["shape"], DTYPES[expected["dtype"]])


def _device_of(inputs) -> str:
    return str(getattr(inputs[0], "device", "cpu")) if inputs else "cpu"
