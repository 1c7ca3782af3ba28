"""Gathers and scatters: embedding, index, gather, index_select, scatter."""

import torch

from .builder import broadcast_loops, same_dim
from .context import broadcast
from .registry import Unsupported, imports
from .shape import extract_slice, insert_slice

aten = torch.ops.aten


def _wrapped(builder, scalar: str, element: str, size: str) -> str:
    """An index that may be negative, as a position counted from the front."""
    at = builder.op(f"arith.index_cast {scalar} : {element} to index")
    zero = builder.constant(0, "index")
    negative = builder.op(f"arith.cmpi slt, {at}, {zero} : index")
    shifted = builder.op(f"arith.addi {at}, {size} : index")
    return builder.op(f"arith.select {negative}, {shifted}, {at} : index")


def _extract(builder, source, at):
    return builder.op(f"tensor.extract {source.name}[{', '.join(at)}] : {source.type}")


@imports(aten.embedding.default, implied=("padding_idx", "scale_grad_by_freq", "sparse"))
def _embedding(context, node, arguments):
    """Row `indices` of the weight; indices are in range by torch's contract."""
    builder, shape = context.builder, context.shape(node)
    weight, indices = context.value(arguments.weight), context.operand(arguments.indices)
    last = len(shape) - 1

    def body(scalar, _):
        row = builder.op(f"arith.index_cast {scalar} : {indices.element} to index")
        column = builder.op(f"linalg.index {last} : index")
        return _extract(builder, weight, [row, column])
    loops = [f"d{i}" for i in range(len(shape))]
    return builder.generic(len(shape), [(indices.value, indices.map_results(loops[:-1]))],
                           builder.empty(shape, weight.element), loops, body,
                           set(range(len(shape))))


@imports(aten.index.Tensor)
def _index(context, node, arguments):
    """Advanced indexing with neighbouring index tensors, broadcast together."""
    builder, shape = context.builder, context.shape(node)
    source = context.value(arguments.self)
    picked = [i for i, index in enumerate(arguments.indices) if index is not None]
    if not picked or picked != list(range(picked[0], picked[-1] + 1)):
        raise Unsupported("index tensors with a full slice between them")
    nodes = [arguments.indices[i] for i in picked]
    if any(context.element(n) == "i1" for n in nodes):
        raise Unsupported("a boolean index, whose result's size depends on data; use torch.where")
    indices = [context.operand(n) for n in nodes]
    width = max(len(i.shape) for i in indices)
    first = picked[0]
    together = shape[first:first + width]
    sizes = [builder.index(source.shape[i]) for i in picked]

    def body(*scalars):
        at = {i: _wrapped(builder, s, operand.element, size) for i, s, operand, size
              in zip(picked, scalars, indices, sizes)}
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


@imports(aten.gather.default, implied=("sparse_grad",))
def _gather(context, node, arguments):
    """result[i, j] = self[i, index[i, j]] along `dim`."""
    builder, shape = context.builder, context.shape(node)
    source, index = context.value(arguments.self), context.operand(arguments.index)
    dim = arguments.dim % len(shape)

    def body(scalar):
        at = []
        for i in range(len(shape)):
            at.append(builder.op(f"arith.index_cast {scalar} : {index.element} to index")
                      if i == dim else builder.op(f"linalg.index {i} : index"))
        return _extract(builder, source, at)
    return builder.map([index], shape, source.element, body)


@imports(aten.index_select.default)
def _index_select(context, node, arguments):
    builder, shape = context.builder, context.shape(node)
    source, index = context.value(arguments.self), context.operand(arguments.index)
    dim = arguments.dim % len(shape)
    loops = [f"d{i}" for i in range(len(shape))]

    def body(scalar, _):
        at = [builder.op(f"arith.index_cast {scalar} : {index.element} to index")
              if i == dim else builder.op(f"linalg.index {i} : index")
              for i in range(len(shape))]
        return _extract(builder, source, at)
    return builder.generic(len(shape), [(index.value, index.map_results([loops[dim]]))],
                           builder.empty(shape, source.element), loops, body,
                           set(range(len(shape))))


@imports(aten.index_put.default)
def _index_put(context, node, arguments):
    """Rows written one after the other, into the memory of what they replace where it may be.

    Indices are in range by torch's contract; no row is written anywhere else.
    """
    picked = [i for i, index in enumerate(arguments.indices) if index is not None]
    if len(picked) != 1 or context.element(arguments.indices[picked[0]]) == "i1" \
            or len(context.shape(arguments.indices[picked[0]])) != 1:
        raise Unsupported("anything but one index tensor of one dim; use torch.scatter")
    if arguments.accumulate:
        raise Unsupported("accumulate=True")
    builder, dim = context.builder, picked[0]
    target = context.value(arguments.self)
    index = context.value(arguments.indices[dim])
    rows = _broadcast_rows(context, arguments.values, index.shape[0], target, dim)
    one_row = [1 if i == dim else size for i, size in enumerate(target.shape)]

    def at(place):
        return [place if i == dim else 0 for i in range(target.rank)]
    size, count = builder.index(target.shape[dim]), builder.index(index.shape[0])
    zero, one = builder.constant(0, "index"), builder.constant(1, "index")
    result, loop, carried, kept = (builder.fresh() for _ in range(4))
    with builder.region(f"scf.for {loop} = {zero} to {count} step {one} "
                        f"iter_args({carried} = {target.name}) -> ({target.type})", result):
        place = _wrapped(builder, _extract(builder, index, [loop]), index.element, size)
        inside = builder.op(f"arith.cmpi ult, {place}, {size} : index")
        with builder.region(f"scf.if {inside} -> ({target.type})", kept, tail=_ELSE.format(
                carried=carried, type=target.type, location=builder.location)):
            row = extract_slice(builder, rows, at(loop), one_row, [1] * target.rank, one_row)
            written = insert_slice(builder, row, type(target)(carried, target.shape,
                                                              target.element), at(place))
            builder.line(f"scf.yield {written.name} : {target.type}")
        builder.line(f"scf.yield {kept} : {target.type}")
    return type(target)(result, target.shape, target.element)


_ELSE = "else {{ scf.yield {carried} : {type} {location} }}"


def _broadcast_rows(context, node, count, target, dim):
    """The values of an index_put, one row an index."""
    shape = tuple(count if i == dim else size for i, size in enumerate(target.shape))
    rows = context.operand(node)
    if rows.is_identity and len(rows.shape) == len(shape) \
            and all(map(same_dim, rows.shape, shape)):
        return context.value(node)
    rows = broadcast(rows, shape)
    return context.builder.map([rows], shape, target.element, lambda x: x)


@imports(aten.scatter.src, aten.scatter.value)
def _scatter(context, node, arguments):
    """Writes one element after the other, so the last of equal targets wins."""
    builder, shape = context.builder, context.shape(node)
    target, index = context.value(arguments.self), context.value(arguments.index)
    dim = arguments.dim % len(shape)
    if node.target is aten.scatter.src:
        source = context.value(arguments.src)
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
