"""Triangular systems, solved row by row in one loop."""

import torch

from ..graph import forward_substitution  # noqa: F401  registers torch.ops.moe.forward_substitution
from .builder import FunctionBuilder, Operand, Value
from .context import broadcast
from .registry import Unsupported, imports
from .shape import extract_slice, insert_slice

aten = torch.ops.aten


def _rows(builder: FunctionBuilder, start: str, stop: str, init: Value, write) -> Value:
    """A loop from `start` to `stop` that carries a matrix; `write(i, matrix)` returns it anew."""
    result, loop, carried = builder.fresh(), builder.fresh(), builder.fresh()
    head = (f"scf.for {loop} = {start} to {stop} step {builder.constant(1, 'index')} "
            f"iter_args({carried} = {init.name}) -> ({init.type})")
    with builder.region(head, result):
        written = write(loop, Value(carried, init.shape, init.element))
        builder.line(f"scf.yield {written.name} : {init.type}")
    return Value(result, init.shape, init.element)


def _weighted(builder: FunctionBuilder, row: Value, rows: Value, init: Value, op: str) -> Value:
    """`init` plus, or minus, the rows with the weights of one row `[.., 1, count]`."""
    batch, element = row.rank - 2, row.element
    loops = [f"d{i}" for i in range(batch + 2)]
    outer, inner, column = loops[:batch], loops[batch], loops[batch + 1]

    def body(weight, x, total):
        product = builder.op(f"arith.mulf {weight}, {x} : {element}")
        return builder.op(f"arith.{op} {total}, {product} : {element}")
    return builder.generic(batch + 2, [(row, [*outer, "0", inner]), (rows, [*outer, inner, column])],
                           init, [*outer, "0", column], body, {*range(batch), batch + 1})


@imports(torch.ops.moe.forward_substitution.default)
def _forward_substitution(context, node, arguments):
    """To each row below `rows` what the rows above it, finished already, add with its weights."""
    builder, matrix = context.builder, context.value(arguments.matrix)
    *batch, height, width = matrix.shape
    rows = context.dim(arguments.rows)
    if matrix.element not in ("f32", "f64"):
        raise Unsupported(f"element type {matrix.element}")
    for size in (height, width):
        context.require(size, ">=", rows)
    ones = [1] * matrix.rank
    front = [0] * len(batch)

    def write(i, current):
        count = builder.open_size(i)
        row = extract_slice(builder, current, [*front, i, 0], [*batch, 1, count], ones,
                            (*batch, 1, count))
        above = extract_slice(builder, current, [*front, 0, 0], [*batch, count, count], ones,
                              (*batch, count, count))
        # A row of its own: where it is read for weights, nothing has been added yet.
        init = builder.map([Operand.of(row)], row.shape, row.element, lambda x: x)
        total = _weighted(builder, row, above, init, "addf")
        return insert_slice(builder, total, current, [*front, i, 0])
    return _rows(builder, builder.constant(1, "index"), builder.index(rows), matrix, write)


@imports(aten.linalg_solve_triangular.default)
def _solve_triangular(context, node, arguments):
    """x of `matrix @ x = right`, from the first row on, or from the last where it is upper."""
    if not arguments.left:
        raise Unsupported("left=False; transpose both sides")
    builder, shape, element = context.builder, context.shape(node), context.element(node)
    *batch, height, width = shape
    matrix, right = (builder.write(broadcast(context.operand(x), (*batch, height, size)))
                     for x, size in ((arguments.self, height), (arguments.B, width)))
    front, ones = [0] * len(batch), [1] * len(shape)
    zero, one = (builder.constant(number, "index") for number in (0, 1))
    size = builder.index(height)

    def write(step, current):
        if arguments.upper:
            left = builder.op(f"arith.subi {size}, {step} : index")
            i = builder.op(f"arith.subi {left}, {one} : index")
            first, count = left, builder.open_size(step)
        else:
            i, first, count = step, zero, builder.open_size(step)
        row = extract_slice(builder, matrix, [*front, i, first], [*batch, 1, count], ones,
                            (*batch, 1, count))
        done = extract_slice(builder, current, [*front, first, 0], [*batch, count, width], ones,
                             (*batch, count, width))
        init = extract_slice(builder, right, [*front, i, 0], [*batch, 1, width], ones,
                             (*batch, 1, width))
        total = _weighted(builder, row, done, init, "subf")
        if not arguments.unitriangular:
            pivot = extract_slice(builder, matrix, [*front, i, i], [*batch, 1, 1], ones,
                                  (*batch, 1, 1))
            total = builder.map(
                [Operand.of(total), Operand(pivot, (*range(len(batch)), None, None), total.shape)],
                total.shape, element, lambda x, p: builder.op(f"arith.divf {x}, {p} : {element}"))
        return insert_slice(builder, total, current, [*front, i, 0])
    return _rows(builder, zero, size, builder.empty(shape, element), write)
