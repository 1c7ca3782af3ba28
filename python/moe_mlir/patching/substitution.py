"""Loops over the rows of a matrix that build a triangular inverse, as one op each in a trace.

Chunked delta rules have one, over 64 rows: unrolled, they are most of the time of a compilation.
The op does what the loop does, so that only the loop's code decides, to the last name.
"""

import ast
import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from ..graph import forward_substitution  # noqa: F401  registers torch.ops.moe.forward_substitution

_LOOP = """
for {i} in range(1, {rows}):
    {row} = {matrix}[..., {i}, :{i}].clone()
    {sub} = {matrix}[..., :{i}, :{i}].clone()
    {matrix}[..., {i}, :{i}] = {row} + ({row}.unsqueeze(-1) * {sub}).sum(-2)
"""
_OP = "{matrix}.copy_(torch.ops.moe.forward_substitution({matrix}, {rows}))"
# Codes of functions, and what they become; None where there is no such loop.
_rewritten: dict[types.CodeType, types.CodeType | None] = {}


@contextlib.contextmanager
def substitutions_as_ops(model: torch.nn.Module) -> Iterator[None]:
    """In the context, functions of the model's files have an op for each such loop."""
    swapped = []
    for function in _functions(model):
        code = function.__code__
        if code not in _rewritten:
            _rewritten[code] = _rewrite(function)
        new = _rewritten[code]
        if new is not None:
            swapped.append((function, code))
            function.__code__ = new
    try:
        yield
    finally:
        for function, code in swapped:
            function.__code__ = code


def _functions(model) -> list[types.FunctionType]:
    """The functions of the files of the model's classes that may have the loop."""
    files = {type(module).__module__ for module in model.modules()}
    found: dict[int, types.FunctionType] = {}
    for name in sorted(files & set(sys.modules)):
        for value in list(vars(sys.modules[name]).values()):
            if not isinstance(value, types.FunctionType):
                continue
            function = inspect.unwrap(value)
            if isinstance(function, types.FunctionType) and not function.__code__.co_freevars \
                    and {"range", "clone", "unsqueeze", "sum"} <= set(function.__code__.co_names) \
                    and function.__globals__.get("torch") is torch:
                found[id(function)] = function
    return list(found.values())


def _rewrite(function) -> types.CodeType | None:
    """The function's code with ops, at the lines of the loops; None where it has no loop."""
    try:
        # Of the whole file: how its imports are called depends on that they are imports.
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, SyntaxError):
        return None
    old = function.__code__
    definition = next((node for node in tree.body if isinstance(node, ast.FunctionDef)
                       and node.name == old.co_name and _first_line(node) == old.co_firstlineno),
                      None)
    if definition is None:
        return None
    before = _compiled(tree, old)
    loops = _Loops(definition)
    loops.visit(definition)
    # A file that was changed after it was imported says something else than what runs.
    if not loops.count or before is None or not _does_the_same(before, old):
        return None
    return _compiled(ast.fix_missing_locations(tree), old)


def _first_line(definition: ast.FunctionDef) -> int:
    return min([definition.lineno, *(x.lineno for x in definition.decorator_list)])


def _compiled(tree: ast.Module, old: types.CodeType) -> types.CodeType | None:
    """The code of the same function in the tree."""
    code = compile(tree, old.co_filename, "exec", dont_inherit=True)
    return next((c for c in code.co_consts if isinstance(c, types.CodeType)
                 and (c.co_name, c.co_firstlineno) == (old.co_name, old.co_firstlineno)), None)


def _does_the_same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two codes differ in their lines at most."""
    pairs = list(zip(a.co_consts, b.co_consts))
    return ((a.co_code, a.co_names, a.co_varnames, a.co_freevars, len(a.co_consts))
            == (b.co_code, b.co_names, b.co_varnames, b.co_freevars, len(b.co_consts))
            and all(_does_the_same(x, y) if isinstance(x, types.CodeType)
                    and isinstance(y, types.CodeType) else type(x) is type(y) and x == y
                    for x, y in pairs))


class _Loops(ast.NodeTransformer):
    """Replaces the loops; `count` says how many."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self._definition = definition
        self.count = 0

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        names = _names_of(node)
        if names is None or any(self._is_used_behind(name, node)
                                for name in (names["row"], names["sub"], names["i"])):
            return node
        self.count += 1
        return ast.copy_location(ast.parse(_OP.format(**names)).body[0], node)

    def _is_used_behind(self, name: str, loop: ast.For) -> bool:
        """Whether anything but this loop, or another loop's own variable, reads what it leaves."""
        inside = {id(x) for x in ast.walk(loop)}
        inside |= {id(x) for other in ast.walk(self._definition) if isinstance(other, ast.For)
                   and isinstance(other.target, ast.Name) and other.target.id == name
                   for x in ast.walk(other)}
        return any(isinstance(x, ast.Name) and x.id == name and id(x) not in inside
                   for x in ast.walk(self._definition))


def _names_of(loop: Any) -> dict[str, str] | None:
    """The names and the number of rows in a loop that is `_LOOP` with these; None of others."""
    try:
        body = loop.body
        names = {"i": loop.target.id, "rows": ast.unparse(loop.iter.args[1]),
                 "row": body[0].targets[0].id, "sub": body[1].targets[0].id,
                 "matrix": body[2].targets[0].value.id}
    except (AttributeError, IndexError):
        return None
    if len(set(names.values())) < len(names) or not names["rows"].isidentifier():
        return None
    return names if ast.dump(loop) == ast.dump(ast.parse(_LOOP.format(**names)).body[0]) else None
