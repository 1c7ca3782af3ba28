"""Sizes that are known at a call: of results, of grids, of the workspace.

torch's programs give them as small arithmetic texts over named sizes, such as
`s27*s77//2`. They travel with a module or an artifact. The evaluator takes
integers, names, `+ - * // % **`, `max` and `min`; anything else in the text is
an error, so a size from an untrusted file runs no code.

The compiler gives those of a function as nested lists over its arguments, such
as `["ceildiv", ["arg", 0, 1], 16]`, in an artifact's manifest.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow}
RELATIONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
              ">": operator.gt, ">=": operator.ge}
_FUNCTIONS = {"max": max, "min": min}
_LARGEST_POWER = 8


def format_size(size: int | sympy.Expr) -> int | str:
    """An int, or the text of a sympy expression."""
    if isinstance(size, int):
        return size
    if size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return str(size)
    kind, operands = type(size).__name__, [str(format_size(a)) for a in size.args]
    if kind in ("Add", "Mul", "Pow"):
        return "(" + {"Add": " + ", "Mul": "*", "Pow": "**"}[kind].join(operands) + ")"
    if kind in ("FloorDiv", "CleanDiv"):
        return f"({operands[0]}//{operands[1]})"
    if kind in ("Mod", "PythonMod"):
        return f"({operands[0]} % {operands[1]})"
    if kind in ("Max", "Min"):
        return f"{kind.lower()}({', '.join(operands)})"
    raise ValueError(f"expected a size made of + - * // % max min, found {size}")


def evaluate_text(text: int | str, symbols: dict[str, int]) -> int:
    """The value of a size text for the given symbols."""
    if isinstance(text, int):
        return text
    return _evaluate(_parse(text), symbols, text)


def linear_in(text: int | str, name: str, symbols: dict[str, int]) -> tuple[int, int] | None:
    """The factor of one symbol in a size text and the rest of it, for the values of the others.

    None where the size is not linear in it.

    >>> linear_in("2*(s0 + s1) - 3", "s0", {"s1": 5})
    (2, 7)
    """
    if isinstance(text, int):
        return 0, text
    return _linear(_parse(text), name, symbols, text)


def _linear(node, name, symbols, text):
    if isinstance(node, ast.Name) and node.id == name:
        return 1, 0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _linear(node.operand, name, symbols, text)
        return inner and (-inner[0], -inner[1])
    if all(n.id != name for n in ast.walk(node) if isinstance(n, ast.Name)):
        return 0, _evaluate(node, symbols, text)
    if not isinstance(node, ast.BinOp):
        return None
    left, right = (_linear(n, name, symbols, text) for n in (node.left, node.right))
    if left is None or right is None:
        return None
    if isinstance(node.op, (ast.Add, ast.Sub)):
        return tuple(_OPERATORS[type(node.op)](a, b) for a, b in zip(left, right))
    if isinstance(node.op, ast.Mult) and 0 in (left[0], right[0]):
        factor, (a, b) = (left[1], right) if left[0] == 0 else (right[1], left)
        return factor * a, factor * b
    return None


def names_in(text: int | str) -> list[str]:
    """The symbols that a size text reads, in order.

    >>> names_in("max(s0*4, s1)")
    ['s0', 's1']
    """
    if isinstance(text, int):
        return []
    found = [n.id for n in ast.walk(_parse(text)) if isinstance(n, ast.Name)]
    return list(dict.fromkeys(name for name in found if name not in _FUNCTIONS))


def unmet_condition(
    conditions: Sequence[tuple[str, str, int]],
    symbols: dict[str, int],
) -> tuple[str, str, int] | None:
    """The first of the (size text, relation, number) that a program was made for and that fails."""
    for condition in conditions:
        text, relation, number = condition
        value = symbols[text] if text in symbols else evaluate_text(text, symbols)
        if not RELATIONS[relation](value, number):
            return condition
    return None


def describe_condition(
    condition: tuple[str, str, int],
    symbols: dict[str, int],
    places: Mapping[str, tuple[str, int | None]],
    why: str,
) -> str:
    """`input 'x': expected dim 1 >= 2, as {why}, found 1`, for an unmet condition.

    Args:
        symbols: the sizes of the call by their names.
        places: the argument's name and dim where each symbol is read; instead of a dim None where
            the name says what it is.
    """
    text, relation, number = condition
    if text in places and places[text][1] is not None:
        name, dim = places[text]
        return f"input '{name}': expected dim {dim} {relation} {number}, as {why}, found {symbols[text]}"
    shown = {symbol: f"{name}.shape[{dim}]" if dim is not None else name
             for symbol, (name, dim) in places.items() if symbol in names_in(text)}
    size = re.sub(r"\w+", lambda word: shown.get(word[0], word[0]), str(text))
    found = ", ".join(f"{place} = {symbols[name]}" for name, place in shown.items())
    return f"input sizes: expected {size} {relation} {number}, as {why}, found {found}"


@lru_cache(maxsize=4096)
def _parse(text: str):
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"expected a size such as 's0*8', found '{text}'") from None


def _evaluate(node, symbols, text) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in symbols:
            raise ValueError(f"size '{text}' uses '{node.id}', which no argument determines")
        return symbols[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, symbols, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_evaluate(n, symbols, text) for n in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and not 0 <= right <= _LARGEST_POWER:
            raise ValueError(f"size '{text}': expected a power in [0, {_LARGEST_POWER}], "
                             f"found {right}")
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)) and right == 0:
            raise ValueError(f"size '{text}' divides by zero")
        return _OPERATORS[type(node.op)](left, right)
    if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            and node.func.id in _FUNCTIONS and node.args and not node.keywords):
        return _FUNCTIONS[node.func.id](*(_evaluate(a, symbols, text) for a in node.args))
    raise ValueError(f"expected a size made of names, integers and + - * // % ** max min, "
                     f"found '{text}'")


def evaluate_expression(size: int | list | None, arguments: Sequence[Any]) -> int | None:
    """The value of a manifest's expression for these arguments; None if it has none."""
    if size is None or isinstance(size, int):
        return size
    operation, *operands = size
    if operation == "arg":
        position, *dim = operands
        if position >= len(arguments):
            return None
        return int(arguments[position].shape[dim[0]] if dim else arguments[position])
    a, b = (evaluate_expression(operand, arguments) for operand in operands)
    return None if a is None or b is None else _OPERATIONS[operation](a, b)


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise ValueError("expected a size that divides by another number than 0")
    return a // b


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "*": operator.mul, "//": _divide, "%": operator.mod,
    "ceildiv": lambda a, b: -(-a // b), "max": max, "min": min}


def expression_sources(size: int | list | None, num_arguments: int) -> list[str]:
    """What a manifest's expression reads, such as "size 0 of argument 2".

    >>> expression_sources(["ceildiv", ["arg", 0, 1], 16], 2)
    ['size 1 of argument 0']
    """
    if size is None or isinstance(size, int):
        return []
    operation, *operands = size
    if operation != "arg":
        return [source for operand in operands for source in expression_sources(operand, num_arguments)]
    position, *dim = operands
    value = (f"argument {position}" if position < num_arguments
             else f"result {position - num_arguments}")
    return [f"size {dim[0]} of {value}" if dim else value]
