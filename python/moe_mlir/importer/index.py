"""Gathers and scatters: embedding, index, gather, index_select, scatter."""

from collections.abc import Sequence

import torch

from .builder import Dim, Operand, broadcast_loops, same_dim
from .context import broadcast
from .registry import Unsupported, imports
from .shape import extract_slice, insert_slice

aten = torch.ops.aten


def _require_within(context, node, index: Sequence[Dim], other: Sequence[Dim],
                    dim: int | None = None) -> None:
    """torch's rule: an index tensor is nowhere larger than what it indexes, but along `dim`."""
    for i, (size, bound) in enumerate(zip(index, other)):
        if i != dim:
            context.require(size, "<=", bound)


# Of a tensor's dims, those that an error can name: moe.assert takes eight values.
_MOST_PLACES = 6


def _in_range(context, node, name: str, operand: Operand, size: Dim,
              negative: bool = False) -> Operand:
    """The indices counted from the front; the call ends with an error where one is out of range.

    Args:
        name: of the operator's argument, for the error.
        size: of the dim that they index.
        negative: whether an index below 0 counts from the end.
    """
    builder = context.builder
    bound = builder.index(size)
    least = "-{1}" if negative else "0"
    value, place = operand.value, _place(operand)
    message = (f"{node.target._opname}: expected '{name}' to be at least {least} and less than "
               f"{{1}}, found {{0}} at [{', '.join(f'{{{i + 2}}}' for i in range(len(place)))}]")

    def body(scalar, _):
        at = builder.op(f"arith.index_cast {scalar} : {value.element} to index")
        if negative:
            below = builder.op(f"arith.cmpi slt, {at}, {builder.constant(0, 'index')} : index")
            shifted = builder.op(f"arith.addi {at}, {bound} : index")
            at = builder.op(f"arith.select {below}, {shifted}, {at} : index")
        inside = builder.op(f"arith.cmpi ult, {at}, {bound} : index")
        places = [(builder.op(f"linalg.index {loop} : index") if loop is not None else
                   builder.constant(0, "index"), "index") for loop in place]
        context.assert_holds(node, inside, "index", message, (scalar, value.element),
                             (bound, "index"), *places)
        return builder.op(f"arith.index_cast {at} : index to {value.element}")
    loops = [f"d{i}" for i in range(value.rank)]
    checked = builder.generic(value.rank, [(value, loops)],
                              builder.empty(value.shape, value.element), loops, body,
                              set(range(value.rank)))
    return Operand(checked, operand.dims, operand.shape)


def _place(operand: Operand) -> list[int | None]:
    """For each of the operand's dims the dim of its value that walks it, if any."""
    walked = {dim: own for own, dim in enumerate(operand.dims) if dim is not None}
    return [walked.get(dim) for dim in range(len(operand.shape))][:_MOST_PLACES]


def _extract(builder, source, at):
    return builder.op(f"tensor.extract {source.name}[{', '.join(at)}] : {source.type}")


@imports(aten.embedding.default, unsigned=True, implied=("padding_idx", "scale_grad_by_freq", "sparse"))
def _embedding(context, node, arguments):
    """Row `indices` of the weight."""
    builder, shape = context.builder, context.shape(node)
    weight = context.value(arguments.weight)
    indices = _in_range(context, node, "indices", context.operand(arguments.indices),
                        weight.shape[0])
    last = len(shape) - 1

    def body(scalar, _):
        row = builder.op(f"arith.index_cast {scalar} : {indices.element} to index")
        column = builder.op(f"linalg.index {last} : index")
        return _extract(builder, weight, [row, column])
    loops = [f"d{i}" for i in range(len(shape))]
    return builder.generic(len(shape), [(indices.value, indices.map_results(loops[:-1]))],
                           builder.empty(shape, weight.element), loops, body,
                           set(range(len(shape))))


@imports(aten.index.Tensor, unsigned=True)
def _index(context, node, arguments):
    """Advanced indexing with neighbouring index tensors, broadcast together."""
    builder, shape = context.builder, context.shape(node)
    source = context.value(arguments.self)
    picked = [i for i, index in enumerate(arguments.indices) if index is not None]
    if not picked or picked != list(range(picked[0], picked[-1] + 1)):
        raise Unsupported("index tensors with a full slice between them")
    nodes = [arguments.indices[i] for i in picked]
    if any(context.element(n) in ("i1", "ui8") for n in nodes):
        raise Unsupported("a boolean index, whose result's size depends on data; use torch.where")
    indices = [_in_range(context, node, f"indices[{i}]", context.operand(n), source.shape[i],
                         negative=True) for i, n in zip(picked, nodes)]
    width = max(len(i.shape) for i in indices)
    first = picked[0]
    together = shape[first:first + width]

    def body(*scalars):
        at = {i: builder.op(f"arith.index_cast {s} : {operand.element} to index")
              for i, s, operand in zip(picked, scalars, indices)}
        for i in range(source.rank):
            if i not in at:
                loop = i if i < first else i - len(picked) + width
                at[i] = builder.op(f"linalg.index {loop} : index")
        return _extract(builder, source, [at[i] for i in range(source.rank)])
    inputs = []
    for operand in indices:
        loops = [l if l == "0" else f"d{first + int(l[1:])}"
                 for l in broadcast_loops(operand.shape, together)]
        inputs.append((operand.value, operand.map_results(loops)))
    loops = [f"d{i}" for i in range(len(shape))]
    return builder.generic(len(shape), inputs, builder.empty(shape, source.element), loops,
                           lambda *scalars: body(*scalars[:-1]), set(range(len(shape))))


@imports(aten.gather.default, unsigned=True, implied=("sparse_grad",))
def _gather(context, node, arguments):
    """result[i, j] = self[i, index[i, j]] along `dim`."""
    builder, shape = context.builder, context.shape(node)
    source, index = context.value(arguments.self), context.operand(arguments.index)
    dim = arguments.dim % len(shape)
    _require_within(context, node, index.shape, source.shape, dim)
    index = _in_range(context, node, "index", index, source.shape[dim])

    def body(scalar):
        at = []
        for i in range(len(shape)):
            at.append(builder.op(f"arith.index_cast {scalar} : {index.element} to index")
                      if i == dim else builder.op(f"linalg.index {i} : index"))
        return _extract(builder, source, at)
    return builder.map([index], shape, source.element, body)


@imports(aten.index_select.default, unsigned=True)
def _index_select(context, node, arguments):
    builder, shape = context.builder, context.shape(node)
    source, index = context.value(arguments.self), context.operand(arguments.index)
    dim = arguments.dim % len(shape)
    index = _in_range(context, node, "index", index, source.shape[dim])
    loops = [f"d{i}" for i in range(len(shape))]

    def body(scalar, _):
        at = [builder.op(f"arith.index_cast {scalar} : {index.element} to index")
              if i == dim else builder.op(f"linalg.index {i} : index")
              for i in range(len(shape))]
        return _extract(builder, source, at)
    return builder.generic(len(shape), [(index.value, index.map_results([loops[dim]]))],
                           builder.empty(shape, source.element), loops, body,
                           set(range(len(shape))))


@imports(aten.index_put.default, unsigned=True)
def _index_put(context, node, arguments):
    """Rows written one after the other, into the memory of what they replace where it may be."""
    picked = [i for i, index in enumerate(arguments.indices) if index is not None]
    if len(picked) != 1 or context.element(arguments.indices[picked[0]]) in ("i1", "ui8") \
            or len(context.shape(arguments.indices[picked[0]])) != 1:
        raise Unsupported("anything but one index tensor of one dim; use torch.scatter")
    if arguments.accumulate:
        raise Unsupported("accumulate=True")
    builder, dim = context.builder, picked[0]
    target = context.value(arguments.self)
    index = builder.write(_in_range(
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
        scalar = _extract(builder, index, [loop])
        place = builder.op(f"arith.index_cast {scalar} : {index.element} to index")
        row = extract_slice(builder, rows, at(loop), one_row, [1] * target.rank, one_row)
        written = insert_slice(builder, row, type(target)(carried, target.shape, target.element),
                               at(place))
        builder.line(f"scf.yield {written.name} : {target.type}")
    return type(target)(result, target.shape, target.element)


def _broadcast_rows(context, node, count, target, dim):
    """The values of an index_put, one row an index."""
    shape = tuple(count if i == dim else size for i, size in enumerate(target.shape))
    rows = context.operand(node)
    if rows.is_identity and len(rows.shape) == len(shape) \
            and all(map(same_dim, rows.shape, shape)):
        return context.value(node)
    rows = broadcast(rows, shape)
    return context.builder.map([rows], shape, target.element, lambda x: x)


@imports(aten.scatter.src, aten.scatter.value, unsigned=True)
def _scatter(context, node, arguments):
    """Writes one element after the other, so the last of equal targets wins."""
    builder, shape = context.builder, context.shape(node)
    target, dim = context.value(arguments.self), arguments.dim % len(shape)
    given = context.operand(arguments.index)
    _require_within(context, node, given.shape, target.shape, dim)
    index = builder.write(_in_range(context, node, "index", given, target.shape[dim]))
    if node.target is aten.scatter.src:
        source = context.value(arguments.src)
        _require_within(context, node, index.shape, source.shape)
        value = None
    else:
        value = context.scalar(arguments.value, target.element)
    bounds = [builder.index(d) for d in index.shape]
    zero, one = builder.constant(0, "index"), builder.constant(1, "index")

    def write(level, at, current):
        if level == len(bounds):
            row = builder.op(f"tensor.extract {index.name}[{', '.join(at)}] : {index.type}")
            row = builder.op(f"arith.index_cast {row} : {index.element} to index")
            element = value or _extract(builder, source, at)
            where = [row if i == dim else a for i, a in enumerate(at)]
            return builder.op(f"tensor.insert {element} into {current}[{', '.join(where)}] : "
                              f"{target.type}")
        result, loop, carried = builder.fresh(), builder.fresh(), builder.fresh()
        head = (f"scf.for {loop} = {zero} to {bounds[level]} step {one} "
                f"iter_args({carried} = {current}) -> ({target.type})")
        with builder.region(head, result):
            inner = write(level + 1, at + [loop], carried)
            builder.line(f"scf.yield {inner} : {target.type}")
        return result
    name = write(0, [], target.name)
    return type(target)(name, target.shape, target.element)
