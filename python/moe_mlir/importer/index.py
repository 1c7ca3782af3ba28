"""Gathers: embedding, index, gather, index_select."""

from collections.abc import Sequence

import torch

from .builder import Dim, Operand, broadcast_loops
from .registry import Unsupported, imports

aten = torch.ops.aten


def require_within(context, node, index: Sequence[Dim], other: Sequence[Dim],
                    dim: int | None = None) -> None:
    """torch's rule: an index tensor is nowhere larger than what it indexes, but along `dim`."""
    for i, (size, bound) in enumerate(zip(index, other)):
        if i != dim:
            context.require(size, "<=", bound)


# Of a tensor's dims, those that an error can name: moe.assert takes eight values.
_MOST_PLACES = 6


def in_range(context, node, name: str, operand: Operand, size: Dim,
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


def extract(builder, source, at):
    return builder.op(f"tensor.extract {source.name}[{', '.join(at)}] : {source.type}")


@imports(aten.embedding.default, unsigned=True, implied=("padding_idx", "scale_grad_by_freq", "sparse"))
def _embedding(context, node, arguments):
    """Row `indices` of the weight."""
    builder, shape = context.builder, context.shape(node)
    weight = context.value(arguments.weight)
    indices = in_range(context, node, "indices", context.operand(arguments.indices),
                        weight.shape[0])
    last = len(shape) - 1

    def body(scalar, _):
        row = builder.op(f"arith.index_cast {scalar} : {indices.element} to index")
        column = builder.op(f"linalg.index {last} : index")
        return extract(builder, weight, [row, column])
    loops = [f"d{i}" for i in range(len(shape))]
    return builder.generic(len(shape), [(indices.value, indices.map_results(loops[:-1]))],
                           builder.empty(shape, weight.element), loops, body,
                           set(range(len(shape))))


def place_of_indices(picked: Sequence[int]) -> int:
    """Of the dims that index tensors for the dims `picked` have together, the first."""
    return picked[0] if list(picked) == list(range(picked[0], picked[-1] + 1)) else 0


@imports(aten.index.Tensor, unsigned=True)
def _index(context, node, arguments):
    """Advanced indexing by tensors that are broadcast together; their dims are where the first
    is, or in front where a slice lies between them."""
    builder, shape = context.builder, context.shape(node)
    source = context.value(arguments.self)
    picked = [i for i, index in enumerate(arguments.indices) if index is not None]
    nodes = [arguments.indices[i] for i in picked]
    if any(context.element(n) in ("i1", "ui8") for n in nodes):
        raise Unsupported("a boolean index, whose result's size depends on data; use torch.where")
    indices = [in_range(context, node, f"indices[{i}]", context.operand(n), source.shape[i],
                         negative=True) for i, n in zip(picked, nodes)]
    width = max(len(i.shape) for i in indices)
    first = place_of_indices(picked)
    others = [i for i in range(len(shape)) if not first <= i < first + width]
    together = shape[first:first + width]

    def body(*scalars):
        at = {i: builder.op(f"arith.index_cast {s} : {operand.element} to index")
              for i, s, operand in zip(picked, scalars, indices)}
        for i, loop in zip((i for i in range(source.rank) if i not in at), others, strict=True):
            at[i] = builder.op(f"linalg.index {loop} : index")
        return extract(builder, source, [at[i] for i in range(source.rank)])
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
    require_within(context, node, index.shape, source.shape, dim)
    index = in_range(context, node, "index", index, source.shape[dim])

    def body(scalar):
        at = []
        for i in range(len(shape)):
            at.append(builder.op(f"arith.index_cast {scalar} : {index.element} to index")
                      if i == dim else builder.op(f"linalg.index {i} : index"))
        return extract(builder, source, at)
    return builder.map([index], shape, source.element, body)


@imports(aten.index_select.default, unsigned=True)
def _index_select(context, node, arguments):
    builder, shape = context.builder, context.shape(node)
    if not shape:
        raise Unsupported("a number, of which an index of an open size takes elements; use x.expand")
    source, index = context.value(arguments.self), context.operand(arguments.index)
    dim = arguments.dim % len(shape)
    index = in_range(context, node, "index", index, source.shape[dim])
    loops = [f"d{i}" for i in range(len(shape))]

    def body(scalar, _):
        at = [builder.op(f"arith.index_cast {scalar} : {index.element} to index")
              if i == dim else builder.op(f"linalg.index {i} : index")
              for i in range(len(shape))]
        return extract(builder, source, at)
    return builder.generic(len(shape), [(index.value, index.map_results([loops[dim]]))],
                           builder.empty(shape, source.element), loops, body,
                           set(range(len(shape))))
