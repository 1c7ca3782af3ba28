"""Writes to chosen places: index_put, scatter, scatter_add."""

from collections.abc import Sequence

import torch
from torch.fx import Node

from .builder import (
    Dim,
    FunctionBuilder,
    Operand,
    Value,
    broadcast_loops,
    compute_element,
    is_float,
    same_dim,
    stored,
)
from .context import Context, broadcast
from .index import extract, in_range, place_of_indices, require_within
from .registry import Arguments, Unsupported, imports
from .shape import extract_slice, insert_slice

aten = torch.ops.aten


def put_together(builder: FunctionBuilder, op: str, x: str, y: str, element: str) -> str:
    """16-bit floats as torch has it: rounded after each operation."""
    wide = element if element == "ui8" else compute_element(element)
    x, y = (builder.convert(value, element, wide) for value in (x, y))
    return builder.convert(builder.op(f"arith.{op} {x}, {y} : {stored(wide)}"), wide, element)


@imports(aten.index_put.default, unsigned=True)
def _index_put(context, node, arguments):
    nodes = {i: index for i, index in enumerate(arguments.indices) if index is not None}
    kinds = {context.element(index) for index in nodes.values()}
    if arguments.accumulate and context.element(arguments.self) == "i1":
        raise Unsupported("accumulate=True of booleans; use a bitwise or")
    if "ui8" in kinds:
        raise Unsupported("an index of uint8, which is a mask; convert it by .bool()")
    if "i1" in kinds:
        if len(nodes) > 1:
            raise Unsupported("a boolean index beside others; use torch.where")
        return _put_where(context, node, arguments, *nodes.popitem())
    if len(nodes) == 1 and not arguments.accumulate:
        dim, index = nodes.popitem()
        if len(context.shape(index)) == 1:
            return _put_rows(context, node, arguments, dim)
        nodes = {dim: index}
    return _put_slices(context, node, arguments, nodes)


def _put_where(context: Context, node: Node, arguments: Arguments, dim: int, mask: Node) -> Value:
    """A mask of the dims from `dim` on; one value for all, or one for each place behind them."""
    builder, target = context.builder, context.operand(arguments.self)
    element, shape = target.element, target.shape
    behind = len(shape) - dim - len(context.shape(mask))
    values = context.operand(arguments.values)
    for size, bound in zip(context.shape(mask), shape[dim:]):
        context.require(size, "==", bound)
    # Those dims of the values that lie behind the mask, and what is in front of them.
    offset, last = len(values.shape) - behind, len(shape) - behind
    if any(size != 1 for size in values.shape[:max(offset, 0)]):
        raise Unsupported("a boolean index and a value for each place that it chooses; use "
                          "torch.where, or masked_scatter")
    walked = {i: last + i - offset for i, size in enumerate(values.shape)
              if i >= offset and size != 1}
    for i, place in walked.items():
        context.require(values.shape[i], "==", shape[place])
    given = Operand(values.value, tuple(None if d is None else walked.get(d)
                                        for d in values.dims), shape)
    flags = Operand(context.value(mask), tuple(range(dim, last)), shape)

    def body(flag, x, y):
        y = builder.convert(y, values.element, element)
        if arguments.accumulate:
            op = "addf" if is_float(element) else "addi"
            y = put_together(builder, op, x, y, element)
        return builder.op(f"arith.select {flag}, {y}, {x} : {stored(element)}")
    return builder.map([flags, target, given], shape, element, body)


def _put_rows(context: Context, node: Node, arguments: Arguments, dim: int) -> Value:
    """Rows written one after the other, into the memory of what they replace where it may be."""
    builder = context.builder
    target = context.value(arguments.self)
    index = builder.write(in_range(
        context, node, f"indices[{dim}]", context.operand(arguments.indices[dim]),
        target.shape[dim], negative=True))
    rows = _broadcast_rows(context, arguments.values, index.shape[0], target, dim)
    one_row = [1 if i == dim else size for i, size in enumerate(target.shape)]

    def at(place):
        return [place if i == dim else 0 for i in range(target.rank)]
    count = builder.index(index.shape[0])
    zero, one = builder.constant(0, "index"), builder.constant(1, "index")
    result, loop, carried = (builder.fresh() for _ in range(3))
    with builder.region(f"scf.for {loop} = {zero} to {count} step {one} "
                        f"iter_args({carried} = {target.name}) -> ({target.type})", result):
        scalar = extract(builder, index, [loop])
        place = builder.op(f"arith.index_cast {scalar} : {index.element} to index")
        row = extract_slice(builder, rows, at(loop), one_row, [1] * target.rank, one_row)
        written = insert_slice(builder, row, Value(carried, target.shape, target.element),
                               at(place))
        builder.line(f"scf.yield {written.name} : {target.type}")
    return Value(result, target.shape, target.element)


def _broadcast_rows(context, node, count, target, dim) -> Value:
    """The values of an index_put, one row an index."""
    shape = tuple(count if i == dim else size for i, size in enumerate(target.shape))
    rows = context.operand(node)
    if rows.is_identity and len(rows.shape) == len(shape) \
            and all(map(same_dim, rows.shape, shape)):
        return context.value(node)
    rows = broadcast(rows, shape)
    return context.builder.map([rows], shape, target.element, lambda x: x)


def _put_slices(context: Context, node: Node, arguments: Arguments,
                nodes: dict[int, Node]) -> Value:
    """For each place of the index tensors, broadcast together, the slice that it chooses."""
    builder, target = context.builder, context.value(arguments.self)
    indices = {i: in_range(context, node, f"indices[{i}]", context.operand(index),
                           target.shape[i], negative=True) for i, index in nodes.items()}
    together = _together(context, [operand.shape for operand in indices.values()])
    first = place_of_indices(list(nodes))
    rest = [size for i, size in enumerate(target.shape) if i not in nodes]
    values = _broadcast_values(context, arguments.values,
                               (*rest[:first], *together, *rest[first:]))
    read = {i: builder.write(operand) for i, operand in indices.items()}
    one = [1 if i in nodes else size for i, size in enumerate(target.shape)]
    op = "addf" if is_float(target.element) else "addi"

    def write(loops: Sequence[str], current: str) -> str:
        at: list[Dim | str] = [0] * target.rank
        for i, value in read.items():
            own = broadcast_loops(value.shape, together)
            place = [builder.constant(0, "index") if x == "0" else loops[int(x[1:])] for x in own]
            at[i] = builder.op(f"arith.index_cast {extract(builder, value, place)} : "
                               f"{value.element} to index")
        given: list[Dim | str] = [0] * first + list(loops) + [0] * (len(rest) - first)
        sizes = [*rest[:first], *[1] * len(together), *rest[first:]]
        piece = extract_slice(builder, values, given, sizes, [1] * values.rank, rest)
        into = Value(current, target.shape, target.element)
        if arguments.accumulate:
            old = extract_slice(builder, into, at, one, [1] * target.rank, rest)
            piece = builder.map([Operand.of(old), Operand.of(piece)], rest, target.element,
                                lambda x, y: put_together(builder, op, x, y, target.element))
        return insert_slice(builder, piece, into, at, one).name
    name = _nest(builder, [builder.index(size) for size in together], target.type, target.name,
                 write)
    return Value(name, target.shape, target.element)


def _together(context: Context, shapes: Sequence[Sequence[Dim]]) -> list[Dim]:
    """The shape that shapes are broadcast to."""
    rank = max(map(len, shapes))
    result: list[Dim] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if result[i] == 1:
                result[i] = size
            elif size != 1:
                context.require(size, "==", result[i])
    return result


def _broadcast_values(context: Context, node: Node, shape: Sequence[Dim]) -> Value:
    values = context.operand(node)
    if len(values.shape) > len(shape):
        raise Unsupported("values of more dims than what they are written to; reshape them")
    for size, bound in zip(values.shape, shape[len(shape) - len(values.shape):]):
        if size != 1:
            context.require(size, "==", bound)
    return context.builder.write(broadcast(values, shape))


def _nest(builder: FunctionBuilder, bounds: Sequence[str], kind: str, current: str, write) -> str:
    """Loops over all bounds that carry a tensor; `write(loops, tensor)` is the body."""
    zero, one = builder.constant(0, "index"), builder.constant(1, "index")

    def level(loops, current):
        if len(loops) == len(bounds):
            return write(loops, current)
        result, loop, carried = builder.fresh(), builder.fresh(), builder.fresh()
        head = (f"scf.for {loop} = {zero} to {bounds[len(loops)]} step {one} "
                f"iter_args({carried} = {current}) -> ({kind})")
        with builder.region(head, result):
            builder.line(f"scf.yield {level([*loops, loop], carried)} : {kind}")
        return result
    return level([], current)


# How elements of one target become one; `include_self` says that the target's own counts.
_REDUCTIONS = {"sum": ("addf", "addi"), "prod": ("mulf", "muli"), "amax": ("maximumf", "maxsi"),
               "amin": ("minimumf", "minsi")}


def _reduction(node, arguments, element: str) -> str | None:
    """The operation of arith that puts an element to its target; None where it replaces it."""
    if node.target in (aten.scatter.src, aten.scatter.value):
        return None
    if node.target is aten.scatter_reduce.two:
        if not arguments.include_self:
            raise Unsupported("include_self=False; fill the targets first")
        kind = arguments.reduce
    else:
        kind = "sum"
    if kind not in _REDUCTIONS or element == "i1":
        raise Unsupported(f"reduce='{kind}' of {element}")
    return _REDUCTIONS[kind][not is_float(element)]


@imports(aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter_reduce(context, node, arguments):
    return _scatter(context, node, arguments)


@imports(aten.scatter.src, aten.scatter.value, unsigned=True)
def _scatter(context, node, arguments):
    """Writes one element after the other, so the last of equal targets wins."""
    builder, shape = context.builder, context.shape(node)
    target, dim = context.value(arguments.self), arguments.dim % len(shape)
    given = context.operand(arguments.index)
    require_within(context, node, given.shape, target.shape, dim)
    index = builder.write(in_range(context, node, "index", given, target.shape[dim]))
    combine = _reduction(node, arguments, target.element)
    if node.target is not aten.scatter.value:
        source = context.value(arguments.src)
        require_within(context, node, index.shape, source.shape)
        value = None
    else:
        value = context.scalar(arguments.value, target.element)

    def write(at, current):
        row = builder.op(f"arith.index_cast {extract(builder, index, at)} : {index.element} to index")
        element = value or extract(builder, source, at)
        where = [row if i == dim else a for i, a in enumerate(at)]
        if combine:
            old = extract(builder, Value(current, target.shape, target.element), where)
            element = put_together(builder, combine, old, element, target.element)
        return builder.op(f"tensor.insert {element} into {current}[{', '.join(where)}] : "
                          f"{target.type}")
    name = _nest(builder, [builder.index(d) for d in index.shape], target.type, target.name, write)
    return Value(name, target.shape, target.element)
