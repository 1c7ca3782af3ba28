"""Operators whose result reads the elements in another order: roll, flip, unfold, repeat."""

import torch

from .registry import imports
from .shape import extract_slice, insert_slice, reshape

aten = torch.ops.aten


def _read(builder, source, shape, place):
    """A tensor of elements of `source`: `place` maps the loops to where each lies."""
    for size in (*source.shape, *shape):
        builder.index(size)  # at the function's entry, not in the loops

    def body():
        at = place([builder.op(f"linalg.index {i} : index") for i in range(len(shape))])
        return builder.op(f"tensor.extract {source.name}[{', '.join(at)}] : {source.type}")
    return builder.map([], shape, source.element, body)


@imports(aten.roll.default, unsigned=True)
def _roll(context, node, arguments):
    """What leaves at one end of a dim enters at the other."""
    builder, value = context.builder, context.value(arguments.self)
    shape, dims = value.shape, arguments.dims
    if not dims:
        count = 1
        for size in shape:
            count = count * size
        value, dims = reshape(builder, value, (count,)), [0]
    for shift, dim in zip(arguments.shifts, dims, strict=True):
        dim = dim % value.rank
        size, shift = value.shape[dim], context.dim(shift)
        if not isinstance(size, int) or not isinstance(shift, int):
            value = _rolled_openly(builder, value, dim, shift)
        elif size:
            value = _rolled(builder, value, dim, shift % size)
    return reshape(builder, value, shape)


def _rolled(builder, value, dim, shift):
    """The last `shift` of a dim first."""
    result, stay = builder.empty(value.shape, value.element), value.shape[dim] - shift
    for start, to, count in ((0, shift, stay), (stay, 0, shift)):
        shape = tuple(count if i == dim else size for i, size in enumerate(value.shape))
        source, target = ([at if i == dim else 0 for i in range(value.rank)] for at in (start, to))
        if count:
            piece = extract_slice(builder, value, source, shape, [1] * value.rank, shape)
            result = insert_slice(builder, piece, result, target)
    return result


def _rolled_openly(builder, value, dim, shift):
    """By, or of, a size that only a call knows."""
    def op(text):
        return builder.op(f"arith.{text} : index")
    zero, size = builder.constant(0, "index"), builder.index(value.shape[dim])
    # Nothing is read where the size is 0; the remainder must not trap there.
    divisor = op(f"maxsi {size}, {builder.constant(1, 'index')}")
    rest = op(f"remsi {builder.index(shift)}, {divisor}")
    is_negative, wrapped = op(f"cmpi slt, {rest}, {zero}"), op(f"addi {rest}, {size}")
    shift = op(f"select {is_negative}, {wrapped}, {rest}")

    def place(at):
        before = op(f"subi {at[dim]}, {shift}")
        is_below = op(f"cmpi slt, {before}, {zero}")
        wrapped = op(f"addi {before}, {size}")
        return [op(f"select {is_below}, {wrapped}, {before}") if i == dim else x
                for i, x in enumerate(at)]
    return _read(builder, value, value.shape, place)


@imports(aten.flip.default, unsigned=True)
def _flip(context, node, arguments):
    builder, source = context.builder, context.value(arguments.self)
    dims = {dim % source.rank for dim in arguments.dims}

    def from_the_end(x, size):
        last = builder.op(f"arith.subi {builder.index(size)}, {builder.constant(1, 'index')} : index")
        return builder.op(f"arith.subi {last}, {x} : index")
    return _read(builder, source, source.shape, lambda at: [
        from_the_end(x, size) if i in dims else x
        for i, (x, size) in enumerate(zip(at, source.shape))])


@imports(aten.unfold.default, unsigned=True)
def _unfold(context, node, arguments):
    """Windows along a dim, `step` apart; what is inside of a window is the last dim."""
    builder, source, shape = context.builder, context.value(arguments.self), context.shape(node)
    if not source.rank:
        return reshape(builder, source, shape)
    dim, size, step = arguments.dimension % source.rank, context.dim(arguments.size), arguments.step
    context.require(source.shape[dim], ">=", size)
    loops = [f"d{i}" for i in range(len(shape))]
    read = [f"{loop} * {step} + {loops[-1]}" if i == dim else loop
            for i, loop in enumerate(loops[:-1])]
    return builder.generic(len(shape), [(source, read)], builder.empty(shape, source.element),
                           loops, lambda x, _: x, set(range(len(shape))))


@imports(aten.diagonal.default, unsigned=True)
def _diagonal(context, node, arguments):
    """The elements at which two dims are equal, `offset` apart, as the last dim."""
    builder, source, shape = context.builder, context.value(arguments.self), context.shape(node)
    rows, columns = arguments.dim1 % source.rank, arguments.dim2 % source.rank
    first = {rows: max(-arguments.offset, 0), columns: max(arguments.offset, 0)}

    def place(at):
        # No affine maps: of an operand's dim that one loop walks the loop would take its size.
        *rest, last = at
        others = iter(rest)
        return [builder.op(f"arith.addi {last}, {builder.constant(first[i], 'index')} : index")
                if i in first else next(others) for i in range(source.rank)]
    return _read(builder, source, shape, place)


@imports(aten.repeat.default, unsigned=True, implied=("repeats",))
def _repeat(context, node, arguments):
    """Reads element (i mod size) of each dimension."""
    builder, shape = context.builder, context.shape(node)
    source = context.value(arguments.self)
    offset = len(shape) - source.rank
    return _read(builder, source, shape, lambda at: [
        builder.op(f"arith.remui {x}, {builder.index(size)} : index")
        for x, size in zip(at[offset:], source.shape)])
