"""What a traced program takes for granted of its open sizes.

Code that asks `x.shape[1] == 1` is traced one way, and torch notes which in a
guard, but leaves the size open where the example has size 1.
"""

import os
from collections.abc import Sequence

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..gpu.sizes import format_size

_TORCH = os.path.dirname(torch.__file__) + os.sep


def input_shapes(program: ExportedProgram) -> list[Sequence[int | torch.SymInt]]:
    """The shapes of the user's inputs, in order."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return [getattr(nodes[name].meta["val"], "shape", ())
            for name in program.graph_signature.user_inputs]


def guards_of(program: ExportedProgram) -> list[sympy.Basic]:
    """The guards that matter for other sizes, as sympy relations over the symbols of sizes.

    Those of the model's own code, and torch's equalities, by which it tells what is broadcast,
    how many pieces a split has, and what a size divides. Where torch's own code prefers a way for
    larger sizes, that way is right for small ones, too.
    """
    shapes = _shape_env(program)
    return [] if shapes is None else guards_in(shapes)


def guards_in(shapes: ShapeEnv) -> list[sympy.Basic]:
    """As `guards_of`, of what torch noted while it traced."""
    return [shapes.replace(guard.expr) for guard in shapes.guards
            if not _is_torchs(guard) or _is_equality(guard.expr)]


def count_noted(program: ExportedProgram) -> int:
    """How many guards torch has noted so far."""
    shapes = _shape_env(program)
    return 0 if shapes is None else len(shapes.guards)


def conditions_noted_since(program: ExportedProgram, count: int) -> list[tuple[str | int, str, int]]:
    """As `conditions`, of all guards after the first `count`, torch's own among them."""
    shapes = _shape_env(program)
    later = [] if shapes is None else shapes.guards[count:]
    asked = [part for guard in later for part in _parts(shapes.replace(guard.expr), program)]
    return list(dict.fromkeys(asked))


def _shape_env(program):
    """What torch noted of open sizes while it traced; None where all are given."""
    modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in program.graph.nodes)
    return next((mode.shape_env for mode in modes
                 if mode is not None and mode.shape_env is not None), None)


def _is_torchs(guard) -> bool:
    place = guard.sloc.framework_loc
    return getattr(place, "filename", "").startswith(_TORCH)


def _is_equality(relation) -> bool:
    return relation.is_Relational and relation.rel_op == "=="


def symbols_refusing(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> set[sympy.Symbol] | None:
    """The symbols of guards that do not hold for the sizes of these tensors.

    None where a size that the program fixed differs, or two that it takes for the same.
    """
    values = _sizes_of(program, tensors)
    if values is None:
        return None
    return {symbol for guard in _unmet(program, values) for symbol in guard.free_symbols}


def first_unequal_symbol(program: ExportedProgram,
                         tensors: Sequence[torch.Tensor]) -> sympy.Symbol | None:
    """The symbol whose size the first guard that does not hold wants to be another number."""
    for guard in _unmet(program, _sizes_of(program, tensors) or {}):
        is_unequal = guard.is_Relational and guard.rel_op == "!="
        return guard.lhs if is_unequal and guard.lhs.is_Symbol and guard.rhs.is_Integer else None
    return None


def _sizes_of(program, tensors):
    """The values of the program's symbols in these tensors; None where they have no such sizes."""
    values: dict[sympy.Symbol, int] = {}
    for shape, tensor in zip(input_shapes(program), tensors):
        for size, actual in zip(shape, tensor.shape):
            if not isinstance(size, torch.SymInt):
                if size != actual:
                    return None
            elif size.node.expr.is_Symbol and values.setdefault(size.node.expr, actual) != actual:
                return None
    return values


def _unmet(program, values):
    """The guards that do not hold, in the order in which the model's code asked."""
    return (guard for guard in guards_of(program)
            if guard.xreplace(values) != True)  # noqa: E712 sympy


def fixed_symbols(program: ExportedProgram) -> set[sympy.Symbol]:
    """The symbols that a guard sets to one number."""
    return {guard.lhs for guard in guards_of(program)
            if guard.is_Relational and guard.rel_op == "==" and guard.lhs.is_Symbol
            and guard.rhs.is_Integer}


def conditions(program: ExportedProgram) -> list[tuple[str | int, str, int]]:
    """The guards as (size, "==", "!=", "<" .., number), where a size is a text over symbols.

    Sizes for which they do not hold take another way through the model's code.
    """
    asked = [part for guard in guards_of(program) for part in _parts(guard, program)]
    return list(dict.fromkeys(asked))


def _parts(guard, program):
    """One guard as conditions that hold together exactly where it holds, or at fewer sizes."""
    if guard == True:  # noqa: E712 sympy
        return []
    if isinstance(guard, sympy.And):
        return [part for inner in guard.args for part in _parts(inner, program)]
    if isinstance(guard, sympy.Not):
        (inner,) = guard.args
        if inner.is_Relational:
            return _parts(inner.negated, program)
    try:
        if guard.is_Relational and guard.lhs.is_Symbol and guard.rhs.is_Integer:
            return [(str(guard.lhs), guard.rel_op, int(guard.rhs))]
        if guard.is_Relational:
            return [(format_size(guard.lhs - guard.rhs), guard.rel_op, 0)]
    except ValueError:
        pass  # a size that is not made of + - * // %
    # What no condition can say holds for the sizes of the example.
    return [(str(symbol), "==", size) for symbol, size in sorted(
        _example_sizes(program, guard.free_symbols).items(), key=str)]


def _example_sizes(program, symbols):
    """The sizes that the symbols stood for while the program was traced."""
    shapes = _shape_env(program)
    if shapes is None:
        return {}
    # The name of torch 2.11, which newer ones deprecate.
    hint = getattr(shapes, "guarding_hint_or_throw", None) or shapes.size_hint
    return {symbol: int(hint(symbol)) for symbol in symbols}


def bounds_of(program: ExportedProgram) -> list[tuple[str, str, int]]:
    """What the exporter said of sizes, `Dim("tokens", min=2, max=64)`, in the same form.

    torch traced for no others. Where nobody said anything, such as Dim.AUTO, torch may
    have a lower bound of its own.
    """
    bounds = []
    for symbol, sizes in program.range_constraints.items():
        if symbol.is_Symbol and sizes.lower.is_Integer and sizes.lower > 0:
            bounds.append((str(symbol), ">=", int(sizes.lower)))
        if symbol.is_Symbol and sizes.upper.is_Integer:
            bounds.append((str(symbol), "<=", int(sizes.upper)))
    return bounds
