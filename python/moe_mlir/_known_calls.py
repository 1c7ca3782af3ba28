"""Calls like an earlier one, which skip what was found out for that one.

To find the program of a call, bind its arguments, compare sizes and look weights up by
name takes fifty microseconds and more than a first cache of code: as much as a small
model computes. A call with inputs of the same kinds and sizes as an earlier one, of a
model whose modules are the same, needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import peek_interpreter_stack

if TYPE_CHECKING:
    from .compiled_program import Call, CompiledProgram

_CONSTANTS = frozenset({type(None), bool, int, float, str, torch.dtype})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CPU = torch.device("cpu")

# What a dictionary must hold under a name: (its `get`, name, expected).
Place = tuple[Callable[[str], Any], str, Any]


def call_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple | None:
    """What calls that are alike have in common; None for one that is looked at each time.

    >>> x = torch.zeros(2, 3)
    >>> call_key((x,), {}) == call_key((torch.ones(2, 3),), {}), call_key((x.T,), {})
    (True, None)
    """
    kinds: list[tuple] = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _TENSORS:
            if not value.is_contiguous() or value.is_neg():
                return None
            kinds.append((value.dtype, value.shape, value.device))
        elif kind in _CONSTANTS:
            kinds.append((kind, value))
        else:
            return None
    return tuple(kwargs), tuple(kinds)


@dataclass(frozen=True, slots=True)
class KnownCall:
    """How to run calls of one key on the CPU."""

    program: CompiledProgram
    # The model as it was: its modules, their modes, and names that hold nothing.
    places: Sequence[Place]
    # (where a tensor is held, name, where it is held as well, name)
    tied: Sequence[tuple]
    # (operand, where it is held, name, dtype); read at each call, since weights change.
    weights: Sequence[tuple[int, Callable[[str], Any], str, torch.dtype]]
    # The operands that no caller gives and no model holds; None in the place of others.
    constants: Sequence[torch.Tensor | None]
    # (operand, number of the call's argument)
    inputs: Sequence[tuple[int, int]]
    # (sizes, dtype) of each result
    results: Sequence[tuple[list[int], torch.dtype]]

    @staticmethod
    def of(program: CompiledProgram, call: Call, given: Sequence[Any]) -> KnownCall | None:
        """What was found out for a call that ran; None if the next like it may need another look."""
        operands = call.operands
        if not program.is_pure or program.target != "cpu":
            return None
        numbers = {id(value): i for i, value in enumerate(given) if isinstance(value, torch.Tensor)}
        if len(numbers) != sum(isinstance(value, torch.Tensor) for value in given):
            return None  # one tensor twice: which input is which would be a guess
        inputs = [(i, numbers[id(operands[i])]) for i in program.inputs
                  if id(operands[i]) in numbers]
        if len(inputs) != len(program.inputs):
            return None
        places = program.module.state.places()
        constants: list = list(operands)
        weights = []
        for i, name in program.weights:
            if name in places.holders:
                if type(operands[i]) not in _TENSORS:
                    return None  # `run` would refuse it each time
                weights.append((i, *places.holders[name], operands[i].dtype))
                constants[i] = None
        for i, _ in inputs:
            constants[i] = None
        return KnownCall(program, places.fixed, places.tied, weights, constants, inputs,
                         call.results)

    def run(self, given: Sequence[Any]) -> tuple[Any] | None:
        """The outputs, in a tuple; None if the model changed, or the code refuses an operand."""
        if peek_interpreter_stack() is not None:
            return None  # inside of vmap or grad
        for get, name, expected in self.places:
            if get(name) is not expected:
                return None
        for get, name, get_other, other in self.tied:
            if get(name) is not get_other(other):
                return None
        operands = list(self.constants)
        for i, get, name, dtype in self.weights:
            tensor = operands[i] = get(name)
            if type(tensor) not in _TENSORS or tensor.dtype is not dtype or tensor.is_neg():
                return None
        for i, number in self.inputs:
            operands[i] = given[number]
        results = [torch.empty(sizes, dtype=dtype, device=_CPU) for sizes, dtype in self.results]
        try:
            self.program.function(*operands, *results)
        except (TypeError, ValueError, RuntimeError, BufferError):
            return None  # refused before it ran: the long way says what is wrong, or traces again
        return (self.program.outputs_of(results),)


__all__ = ["KnownCall", "call_key"]
