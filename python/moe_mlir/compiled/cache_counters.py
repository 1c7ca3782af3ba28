"""Counters of a cache as what a remembered call knows of them: in which bounds, by how much."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from .._transformers.cache_state import SMALLEST_SIZE, CacheTensors, SizeText
from ..gpu.sizes import linear_in, names_in

if TYPE_CHECKING:
    from ..frontends.export import Module

_MOST = sys.maxsize // 2


class Counter(NamedTuple):
    """The operand whose first size says a counter, the values for which its program runs, and what
    a call adds to it."""

    operand: int
    least: int
    most: int
    step: int


def counters_of(module: Module, parts: CacheTensors, symbols: dict[str, int]) -> list[Counter] | None:
    """The counters of a cache in calls whose other open sizes are `symbols`.

    None where a call like it may need another look: where a result's size depends on a counter, a
    condition on it is not linear, or a call changes more than counters.
    """
    if not parts.form.counters and not module.cache_changes[0]:
        return []
    program = module.program
    operands = [position for position, argument in enumerate(program.arguments)
                if argument.kind == "input" and argument.name.split(".", 1)[-1]
                in parts.form.counter_names]
    names = [str(program.arguments[position].shape[0]) for position in operands]
    open_names = {name for name in names if name in symbols}
    others = [text for position, argument in enumerate(program.arguments) if position not in operands
              for text in argument.shape]
    shapes = [*others, *(text for result in program.results for text in result.shape)]
    if len(operands) != len(parts.form.counters) or any(open_names & {*names_in(t)} for t in shapes):
        return None
    bounds = {name: _bounds(module, name, open_names, symbols) for name in names}
    steps = _steps(module, parts, names, symbols)
    if steps is None or None in bounds.values():
        return None
    return [Counter(operand, least, most, step) for operand, (least, most), step in
            zip(operands, map(bounds.__getitem__, names), steps)]


def _bounds(module, name, open_names, symbols):
    """Least and most of a counter; None where they are not known."""
    if name not in open_names:
        return (int(name) - SMALLEST_SIZE,) * 2
    low, high = 0, _MOST
    for text, relation, number in module.conditions:
        found = open_names & {*names_in(text)}
        if not found:
            continue
        linear = linear_in(text, name, symbols) if found == {name} else None
        if linear is None:
            return None
        factor, rest = linear
        # factor * (counter + SMALLEST_SIZE) + rest  <relation>  number
        rest = number - rest - factor * SMALLEST_SIZE
        low, high = _within(low, high, factor, relation, rest, symbols[name] - SMALLEST_SIZE)
    return low, high


def _within(low, high, factor, relation, bound, now):
    """The part of [low, high] around `now` in which `factor * x <relation> bound`."""
    if factor == 0:
        return low, high
    if factor < 0:
        factor, bound = -factor, -bound
        relation = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(relation, relation)
    floor, ceiling = bound // factor, -(-bound // factor)
    if relation == "==":
        return max(low, now), min(high, now)
    if relation == "!=":
        if floor != ceiling:
            return low, high
        return (max(low, floor + 1), high) if now > floor else (low, min(high, floor - 1))
    if relation in ("<", "<="):
        return low, min(high, floor if relation == "<=" else ceiling - 1)
    return max(low, ceiling if relation == ">=" else floor + 1), high


def _steps(module, parts, names, symbols):
    """What a call adds to each counter; None where it changes something else, or not all alike."""
    group_of = {path: number for number, group in enumerate(parts.form.counters) for path in group}
    steps = [dict.fromkeys(group, 0) for group in parts.form.counters]
    for path, value in module.cache_changes[0]:
        number = group_of.get(path)
        if number is None:
            return None
        name = names[number]
        if not isinstance(value, SizeText):
            if name in symbols:
                return None
            steps[number][path] = value - (int(name) - SMALLEST_SIZE)
            continue
        linear = linear_in(value, name, symbols)
        if linear is None or linear[0] != (1 if name in symbols else 0):
            return None
        before = SMALLEST_SIZE if linear[0] else SMALLEST_SIZE - int(name)
        steps[number][path] = linear[1] + before
    if any(len(set(group.values())) > 1 for group in steps):
        return None
    return [next(iter(group.values())) for group in steps]


__all__ = ["Counter", "counters_of"]
