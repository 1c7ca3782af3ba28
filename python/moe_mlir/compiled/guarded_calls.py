"""Calls like an earlier one, which skip what was found out for that one.

To find the program of a call, bind its arguments, compare sizes and look weights up by
name takes fifty microseconds and more than a first cache of code: as much as a small
model computes. A call with inputs of the same kinds and sizes as an earlier one, of a
model whose modules are the same, needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import copysign
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._torch.core import innermost_transform
from .._transformers.static_cache import caches_of, initialized_tensors, token_count
from ..experts.packed_weight import PackedWeight
from ..guards.model_form import is_unchanged
from ..guards.updated_memory import UpdatedMemory

if TYPE_CHECKING:
    from .program import Call, CompiledProgram

_CONSTANTS = frozenset({type(None), bool, int, float, str, torch.dtype})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CPU = torch.device("cpu")


class CallDescription(NamedTuple):
    """What a caller gave, as far as calls that are alike differ."""

    # What they have in common.
    key: tuple
    # The tensors of the arguments, in order; those of a cache in its place.
    tensors: list[torch.Tensor]
    # The cache of keys and values among the arguments, and where its tensors begin.
    cache: Any = None
    cache_begin: int = 0


def describe_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallDescription | None:
    """The tensors of a call and what it is like; None for one that is looked at each time.

    >>> x = torch.zeros(2, 3)
    >>> describe_call((x,), {}).key == describe_call((torch.ones(2, 3),), {}).key
    True
    >>> describe_call((x.T,), {}) is None
    True
    """
    kinds: list[tuple] = []
    tensors: list[torch.Tensor] = []
    cache, begin = None, 0
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _CONSTANTS:
            kinds.append((kind, value if kind is not float else (value, copysign(1.0, value))))
        elif kind in _TENSORS:
            kinds.append((value.dtype, value.shape, value.device))
            tensors.append(value)
        else:
            kept = None if cache is not None else initialized_tensors(value)
            if kept is None:
                return None
            cache, begin = value, len(tensors)
            kinds.append((kind, kept.lengths,
                          *[(type(t), t.dtype, t.shape, t.device) for t in kept.tensors]))
            tensors += kept.tensors
    for tensor in tensors:
        if type(tensor) not in _TENSORS or not tensor.is_contiguous() or tensor.is_neg():
            return None
    return CallDescription((tuple(kwargs), tuple(kinds)), tensors, cache, begin)


@dataclass(frozen=True, slots=True)
class GuardedCall:
    """How to run calls of one key on the CPU."""

    program: CompiledProgram
    # The model as it was, for `is_unchanged`: its modules, attributes and hooks.
    form: tuple[tuple, tuple, tuple]
    # (where a tensor would hide a weight, name)
    hiding: Sequence[tuple]
    # (where a tensor is held, name, where it is held as well, name)
    tied: Sequence[tuple]
    # (operand, where it is held, name, dtype); read at each call, since weights change.
    weights: Sequence[tuple[int, Callable[[str], Any], str, torch.dtype]]
    # The operands that no caller gives and no model holds; None in the place of others.
    constants: Sequence[torch.Tensor | None]
    # (operand, number of the call's tensor)
    inputs: Sequence[tuple[int, int]]
    # (sizes, dtype) of each result that is made anew; None for an updated operand.
    results: Sequence[tuple[list[int], torch.dtype] | None]
    memory: UpdatedMemory | None
    # (number of the tensor that counts the tokens in the cache, the most before this call)
    room: tuple[int, int] | None

    @staticmethod
    def of(program: CompiledProgram, call: Call, given: CallDescription,
           values: dict[str, Any]) -> GuardedCall | None:
        """What was found out for a call with these values by name, which ran.

        None if the next call like it may need another look.
        """
        if program.target != "cpu" or program.returns_updated:
            return None
        operands = call.operands
        numbers = {id(tensor): i for i, tensor in enumerate(given.tensors)}
        if len(numbers) != len(given.tensors):
            return None  # one tensor twice: which input is which would be a guess
        inputs = [(i, numbers[id(operands[i])]) for i in program.inputs
                  if id(operands[i]) in numbers]
        if len(inputs) != len(program.inputs):
            return None
        guards = program.module.state.guards()
        constants: list = list(operands)
        weights = []
        for i, name in program.weights:
            if name in guards.holders:
                if type(operands[i]) not in _TENSORS:
                    return None  # `run` would refuse it each time
                weights.append((i, *guards.holders[name], operands[i].dtype))
                constants[i] = None
        for i, _ in inputs:
            constants[i] = None
        updated = program.updated
        return GuardedCall(
            program, guards.form, guards.hiding, guards.tied, weights, constants, inputs,
            [None if i in updated else result for i, result in enumerate(call.results)],
            UpdatedMemory(updated.values(), program.inputs) if updated else None,
            next(((given.cache_begin + cache.length_index,
                   cache.form.lengths[0] - token_count(values, program.module.model))
                  for cache in caches_of(values)), None))

    def run(self, given: CallDescription) -> tuple[Any] | None:
        """The outputs, in a tuple; None if the model changed, or the code refuses an operand."""
        if innermost_transform() is not None:
            return None  # inside of vmap or grad
        if not is_unchanged()(*self.form):
            return None
        for get, name in self.hiding:
            if get(name) is not None:
                return None
        for get, name, get_other, other in self.tied:
            if get(name) is not get_other(other):
                return None
        tensors = given.tensors
        if self.room is not None and int(tensors[self.room[0]]) > self.room[1]:
            return None  # the long way says so
        operands = list(self.constants)
        for i, get, name, dtype in self.weights:
            tensor = get(name)
            if type(tensor) is PackedWeight:
                tensor = tensor.panels
            operands[i] = tensor
            if type(tensor) not in _TENSORS or tensor.dtype is not dtype or tensor.is_neg():
                return None
        for i, number in self.inputs:
            operands[i] = tensors[number]
        if self.memory is not None and not self.memory.is_disjoint(operands):
            return None
        results = [None if made is None else torch.empty(made[0], dtype=made[1], device=_CPU)
                   for made in self.results]
        try:
            self.program.function(*operands, *[r for r in results if r is not None])
        except (TypeError, ValueError, RuntimeError, BufferError):
            return None  # refused before it ran: the long way says what is wrong, or traces again
        return (self.program.outputs_of(results, (given.cache,)),)


__all__ = ["CallDescription", "GuardedCall", "describe_call"]
