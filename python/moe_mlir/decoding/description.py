"""What an artifact says of a decoder, as JSON: its programs, and what they keep from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..artifact import weights_file
from ..importer.program import Argument, Result
from .last_logits import name_in_model
from .states import CacheStates
from .traced import CACHE, TracedProgram, counter_classes


def name_of(number: int) -> str:
    """Of the function of a program."""
    return f"program_{number}"


def describe(programs: Sequence[TracedProgram], states: CacheStates, room: int, sequences: int,
             vocabulary: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The description, and the tensors to store by name."""
    stored = _Stored()
    state = _state_of(programs, states)
    made = {state.find(name, result) for program in programs for name, result in program.made}
    form = states.form(states.initial.form)
    counters = dict(zip((path for path, in form.counters), states.initial.counters, strict=True))
    classes = counter_classes(programs, counters)
    class_of = {path: i for i, paths in enumerate(classes) for path in paths}
    return {
        "room": room, "sequences": sequences, "vocabulary": vocabulary,
        "form": states.initial.form,
        "counters": [counters.get(paths[0], 0) for paths in classes],
        "state": [{"name": name, **_type_of(tensor),
                   "stored_as": stored.add(f"{name}.initial", tensor)
                   if _has_bits(tensor) or (name in made and tensor.numel()) else None}
                  for name, tensor in state.tensors.items()],
        "programs": [_describe_program(number, program, state, class_of, stored)
                     for number, program in enumerate(programs)],
    }, stored.tensors


class _State:
    """The tensors that calls keep, by name. One of a cache may be of one kind before the first call,
    and of another one after it: these are two."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[str, torch.dtype, int], str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        key = name, tensor.dtype, tensor.dim()
        if key not in self._names:
            while name in self.tensors:
                name = f"{name}.{tensor.dim()}d"
            self._names[key], self.tensors[name] = name, tensor

    def find(self, name: str, kind: Argument | Result) -> str | None:
        """The name of what is of this kind under a name of a program; None for no state."""
        return self._names.get((name, kind.dtype, len(kind.shape)))


def _state_of(programs, states) -> _State:
    """The tensors that calls keep, as they are at first: those of the cache, of which those without
    elements come with a call; and buffers that a program updates."""
    state, form = _State(), states.form(states.initial.form)
    for name, tensor in zip(form.tensor_names, states.first, strict=True):
        state.add(f"{CACHE}.{name}", tensor)
    for program in programs:
        for name, result in program.made:
            state.add(name, torch.zeros([0] * len(result.shape), dtype=result.dtype))
        for result in program.module.program.results:
            if result.kind == "state":
                state.add(name_in_model(result.name), program.module.state[result.name])
    # A cache may keep what no program reads or makes, such as empty tensors before the first call.
    used = {state.find(name, argument) for program in programs for name, argument in _named(program)}
    used |= {state.find(name, result) for program in programs for name, result in program.made}
    state.tensors = {name: tensor for name, tensor in state.tensors.items() if name in used}
    return state


def _named(program) -> list[tuple[str, Argument]]:
    """The arguments by the names that the artifact has for them."""
    return [(argument.name if argument.kind == "input" else name_in_model(argument.name), argument)
            for argument in program.module.program.arguments]


def _describe_program(number, program, state, class_of, stored) -> dict[str, Any]:
    module = program.module
    counters = {position: sorted({class_of[path] for path in group}) for position, group in program.groups}
    arguments = []
    for position, (name, argument) in enumerate(_named(program)):
        described = {"name": name, "shape": list(argument.shape)}
        if position == program.ids:
            described["kind"] = "ids"
        elif position in counters:
            described |= {"kind": "counter", "counters": counters[position]}
        elif state.find(name, argument):
            described |= {"kind": "state", "name": state.find(name, argument)}
        else:
            described |= {"kind": "weight",
                          "stored_as": stored.add(name, module.state[argument.name])}
        arguments.append(described)
    return {
        "function": name_of(number), "form": program.form, "next_form": program.next_form,
        "arguments": arguments,
        "symbols": {name: list(place) for name, place in module.program.symbols.items()},
        "conditions": [list(condition) for condition in module.conditions],
        "changes": [list(change) for change in sorted(
            {class_of[path]: value for path, value in program.changes.items()}.items())],
        "makes": [{"name": state.find(name, result), "shape": list(result.shape)}
                  for name, result in program.made],
    }


def _type_of(tensor) -> dict[str, Any]:
    dtype = weights_file.element_type(tensor)
    return {"dtype": dtype, "shape": list(tensor.shape)}


def _has_bits(tensor) -> bool:
    """Whether the tensor is other than zeros, to the sign."""
    return bool(tensor.detach().contiguous().reshape(-1).view(torch.uint8).any())


class _Stored:
    """The tensors that an artifact stores, each once, whatever programs call it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """The name under which a tensor is stored."""
        # Tensors without elements may have one address and be of several sizes.
        key = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        if key not in self._names:
            # A constant of one program may have the name of another's.
            while name in self.tensors or weights_file.is_reserved(name):
                name = f"weight.{name}"
            self._names[key], self.tensors[name] = name, tensor
        return self._names[key]


__all__ = ["describe", "name_of"]
