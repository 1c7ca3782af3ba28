"""Reductions, softmax, layer norm."""

from collections.abc import Callable, Collection

import torch

from .builder import (
    FLOAT_BITS,
    FunctionBuilder,
    Operand,
    Value,
    compute_element,
    is_float,
    stored,
)
from .context import ELEMENTS
from .matmul import round_to
from .registry import Unsupported, imports
from .shape import reshape

aten = torch.ops.aten
_INF = float("inf")


def _dims(dims, rank: int) -> list[int]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    return [] if rank == 0 else sorted(d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def reduce(builder: FunctionBuilder, operand: Operand, dims: Collection[int], element: str,
           start: float, body: Callable[..., str]) -> Value:
    """Folds `body(x, total)` over `dims`; the result drops them."""
    rank = len(operand.shape)
    if not set(dims) <= set(operand.dims):
        # No operand would say how often what is broadcast is taken.
        operand = Operand.of(builder.write(operand))
    kept = [i for i in range(rank) if i not in dims]
    init = builder.fill(builder.constant(start, element), [operand.shape[i] for i in kept],
                        element)
    loops = [f"d{i}" for i in range(rank)]

    def convert(x, total):
        return body(builder.convert(x, operand.element, element), total)
    return builder.generic(rank, [(operand.value, operand.map_results(loops))], init,
                           [f"d{i}" for i in kept], convert, set(kept))


def _combine(builder, op: str, element: str):
    return lambda x, total: builder.op(f"arith.{op} {x}, {total} : {element}")


def _kept(context, node, value: Value) -> Value:
    """With `keepdim` the node's shape has the reduced dimensions as 1s."""
    return reshape(context.builder, value, context.shape(node))


def unreduced(shape, dims) -> list:
    return [1 if i in dims else d for i, d in enumerate(shape)]


def _check_rounding(operand, element) -> None:
    """With a dtype that does not hold the operand torch rounds it before it reduces it."""
    bits = FLOAT_BITS.get(operand.element, 0)
    if operand.element != element and FLOAT_BITS.get(element, 65) <= bits:
        raise Unsupported(f"argument 'dtype' = {element} for {operand.element} operands, which "
                          "would be rounded first; convert the operand or the result")


def _sum(builder, operand, dims, element) -> Value:
    return reduce(builder, operand, dims, element, 0,
                  _combine(builder, "addf" if is_float(element) else "addi", element))


@imports(aten.sum.dim_IntList, aten.sum.default, unsigned=True)
def _sum_op(context, node, arguments):
    operand, element = context.operand(arguments.self), context.element(node)
    _check_rounding(operand, element)
    dims = _dims(getattr(arguments, "dim", None), len(operand.shape))
    total = _sum(context.builder, operand, dims, compute_element(element))
    return _kept(context, node, round_to(context.builder, total, element))


def _count(context, shape, dims, element: str) -> str:
    """The number of reduced elements as a float scalar."""
    builder, count = context.builder, 1
    for d in dims:
        count = count * shape[d]
    if isinstance(count, int):
        return builder.constant(count, element)
    whole = builder.op(f"arith.index_cast {builder.index(count)} : index to i64")
    return builder.op(f"arith.sitofp {whole} : i64 to {element}")


def _mean(context, operand, dims, element) -> Value:
    builder = context.builder
    count = _count(context, operand.shape, dims, element)
    total = _sum(builder, operand, dims, element)
    return builder.map([Operand.of(total)], total.shape, element,
                       lambda x: builder.op(f"arith.divf {x}, {count} : {element}"))


@imports(aten.mean.dim, aten.mean.default, unsigned=True)
def _mean_op(context, node, arguments):
    operand, element = context.operand(arguments.self), context.element(node)
    _check_rounding(operand, element)
    dims = _dims(getattr(arguments, "dim", None), len(operand.shape))
    mean = _mean(context, operand, dims, compute_element(element))
    return _kept(context, node, round_to(context.builder, mean, element))


@imports(aten.prod.default, aten.prod.dim_int)
def _prod(context, node, arguments):
    operand, element = context.operand(arguments.self), context.element(node)
    _check_rounding(operand, element)
    builder, wide = context.builder, compute_element(element)
    dims = _dims(getattr(arguments, "dim", None), len(operand.shape))
    total = reduce(builder, operand, dims, wide, 1,
                   _combine(builder, "mulf" if is_float(wide) else "muli", wide))
    return _kept(context, node, round_to(builder, total, element))


@imports(aten.var.correction)
def _var(context, node, arguments):
    return _kept(context, node, _variance(context, arguments)[0])


@imports(aten.var_mean.correction)
def _var_mean(context, node, arguments):
    return [reshape(context.builder, value, context.shape(tensor))
            for value, tensor in zip(_variance(context, arguments), node.meta["val"])]


def _variance(context, arguments) -> list[Value]:
    """The variance and the mean, without the dims that they are of."""
    operand, element = context.operand(arguments.self), context.element(arguments.self)
    builder, wide = context.builder, compute_element(element)
    dims = _dims(arguments.dim, len(operand.shape))
    correction = 1 if arguments.correction is None else arguments.correction
    mean = _mean(context, operand, dims, wide)
    squares = _squared_distances(builder, operand, mean, dims, wide)
    total = _sum(builder, Operand.of(squares), dims, wide)
    count = _count(context, operand.shape, dims, wide)
    freedom = builder.op(f"arith.subf {count}, {builder.constant(correction, wide)} : {wide}")
    freedom = builder.op(f"arith.maximumf {freedom}, {builder.constant(0, wide)} : {wide}")
    var = builder.map([Operand.of(total)], total.shape, wide,
                      lambda x: builder.op(f"arith.divf {x}, {freedom} : {wide}"))
    return [round_to(builder, value, element) for value in (var, mean)]


def _over(builder, value: Value, shape, dims) -> Operand:
    """A reduced value, seen again at every element that was reduced into it."""
    kept = tuple(i for i in range(len(shape)) if i not in dims)
    return Operand(value, kept, tuple(shape))


def _squared_distances(builder, operand, mean, dims, element) -> Value:
    def body(x, m):
        x = builder.convert(x, operand.element, element)
        gap = builder.op(f"arith.subf {x}, {m} : {element}")
        return builder.op(f"arith.mulf {gap}, {gap} : {element}")
    return builder.map([operand, _over(builder, mean, operand.shape, dims)], operand.shape,
                       element, body)


@imports(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default,
         unsigned=True)
def _extreme(context, node, arguments):
    operand, element = context.operand(arguments.self), context.element(node)
    largest = node.target in (aten.amax.default, aten.max.default)
    dims = _dims(getattr(arguments, "dim", None), len(operand.shape))
    _require_elements(context, operand, dims)
    value = _fold_extreme(context.builder, operand, dims, element, largest)
    return _kept(context, node, value)


def _require_elements(context, operand, dims) -> None:
    """Nothing has no extreme."""
    for dim in dims:
        context.require(operand.shape[dim], "!=", 0)


def _fold_extreme(builder, operand, dims, element, largest) -> Value:
    start: float
    if element == "ui8":
        wide = _fold_extreme(builder, operand, dims, compute_element(element), largest)
        return round_to(builder, wide, element)
    if element == "i1":
        op, start = ("ori", False) if largest else ("andi", True)
    elif is_float(element):
        op, start = ("maximumf", -_INF) if largest else ("minimumf", _INF)
    else:
        bits = int(element[1:])
        op, start = (("maxsi", -(1 << bits - 1)) if largest else ("minsi", (1 << bits - 1) - 1))
    return reduce(builder, operand, dims, element, start, _combine(builder, op, element))


@imports(aten.any.dim, aten.any.dims, aten.any.default, aten.all.dim, aten.all.default)
def _any_all(context, node, arguments):
    operand = context.operand(arguments.self)
    is_any = node.target._opname == "any"
    dims = _dims(getattr(arguments, "dim", None), len(operand.shape))
    value = reduce(context.builder, operand, dims, "i1", not is_any,
                   _combine(context.builder, "ori" if is_any else "andi", "i1"))
    return _kept(context, node, value)


# ---- softmax and layer norm ------------------------------------------------------

def _softmax_parts(context, operand, dim, element):
    """exp(x - max x) and the logarithm's pieces; rows of -inf give NaN as torch."""
    builder = context.builder
    top = reduce(builder, operand, [dim], element, -_INF, _combine(builder, "maximumf", element))

    def shift(x, m):
        x = builder.convert(x, operand.element, element)
        return builder.op(f"arith.subf {x}, {m} : {element}")
    over = _over(builder, top, operand.shape, [dim])
    return shift, over


@imports(aten._softmax.default, aten._safe_softmax.default, aten.softmax.int,
         implied=("half_to_float",))
def _softmax(context, node, arguments):
    builder, element = context.builder, context.element(node)
    operand = context.operand(arguments.self)
    _check_rounding(operand, element)
    wide, rank = compute_element(element), len(operand.shape)
    dim = arguments.dim % rank
    safe = node.target is aten._safe_softmax.default
    shift, top = _softmax_parts(context, operand, dim, wide)

    def power(x, m):
        value = builder.op(f"math.exp {shift(x, m)} : {wide}")
        if not safe:
            return value
        # A row without any finite score has probabilities 0, not NaN.
        low = builder.constant(-_INF, wide)
        empty = builder.op(f"arith.cmpf oeq, {m}, {low} : {wide}")
        return builder.op(f"arith.select {empty}, {builder.constant(0, wide)}, {value} : {wide}")
    powers = builder.map([operand, top], operand.shape, wide, power)
    total = _sum(builder, Operand.of(powers), [dim], wide)

    def divide(x, t):
        if safe:
            zero, one = builder.constant(0, wide), builder.constant(1, wide)
            empty = builder.op(f"arith.cmpf oeq, {t}, {zero} : {wide}")
            t = builder.op(f"arith.select {empty}, {one}, {t} : {wide}")
        return builder.convert(builder.op(f"arith.divf {x}, {t} : {wide}"), wide, element)
    return builder.map([Operand.of(powers), _over(builder, total, operand.shape, [dim])],
                       operand.shape, element, divide)


@imports(aten._log_softmax.default, implied=("half_to_float",))
def _log_softmax(context, node, arguments):
    builder, element = context.builder, context.element(node)
    operand = context.operand(arguments.self)
    wide = compute_element(element)
    dim = arguments.dim % len(operand.shape)
    shift, top = _softmax_parts(context, operand, dim, wide)
    powers = builder.map([operand, top], operand.shape, wide,
                         lambda x, m: builder.op(f"math.exp {shift(x, m)} : {wide}"))
    total = _sum(builder, Operand.of(powers), [dim], wide)

    def body(x, m, t):
        log = builder.op(f"math.log {t} : {wide}")
        return builder.convert(
            builder.op(f"arith.subf {shift(x, m)}, {log} : {wide}"), wide, element)
    return builder.map([operand, top, _over(builder, total, operand.shape, [dim])],
                       operand.shape, element, body)


@imports(aten.native_layer_norm.default)
def _layer_norm(context, node, arguments):
    """(x - mean) rsqrt(var + eps) weight + bias over the last dimensions."""
    builder, operand = context.builder, context.operand(arguments.input)
    element = operand.element
    wide, shape = compute_element(element), operand.shape
    width = len(arguments.normalized_shape)
    dims = list(range(len(shape) - width, len(shape)))
    mean = _mean(context, operand, dims, wide)
    squares = _squared_distances(builder, operand, mean, dims, wide)
    var = _mean(context, Operand.of(squares), dims, wide)
    eps = builder.constant(arguments.eps, wide)

    def inverse(v):
        return builder.op(f"math.rsqrt {builder.op(f'arith.addf {v}, {eps} : {wide}')} : {wide}")
    rstd = builder.map([Operand.of(var)], var.shape, wide, inverse)
    affine = [context.operand(x) for x in (arguments.weight, arguments.bias) if x is not None]

    def body(x, m, r, *rest):
        x = builder.convert(x, element, wide)
        gap = builder.op(f"arith.subf {x}, {m} : {wide}")
        value = builder.op(f"arith.mulf {gap}, {r} : {wide}")
        factors = iter(zip(rest, affine))
        for given, op in ((arguments.weight, "mulf"), (arguments.bias, "addf")):
            if given is not None:
                scalar, source = next(factors)
                scalar = builder.convert(scalar, source.element, wide)
                value = builder.op(f"arith.{op} {value}, {scalar} : {wide}")
        return builder.convert(value, wide, element)
    normal = builder.map([operand, _over(builder, mean, shape, dims),
                          _over(builder, rstd, shape, dims), *affine], shape, element, body)
    statistics = unreduced(shape, dims)
    kind = ELEMENTS[node.meta["val"][1].dtype]
    return [normal, *(reshape(builder, round_to(builder, x, kind), statistics) for x in (mean, rstd))]


# ---- positions of extremes --------------------------------------------------

def _arg_extreme(context, operand, dim, largest) -> tuple[Value, Value]:
    """The lowest position of the extreme along `dim`; NaN counts as the extreme."""
    builder, element = context.builder, operand.element
    best = _fold_extreme(builder, operand, [dim], element, largest)
    size = builder.op(f"arith.index_cast {builder.index(operand.shape[dim])} : index to i64")

    def candidate(x, b):
        code = "cmpf oeq" if is_float(element) else "cmpi eq"
        loop = builder.op(f"linalg.index {dim} : index")
        at = builder.op(f"arith.index_cast {loop} : index to i64")
        hit = builder.op(f"arith.{code}, {x}, {b} : {stored(element)}")
        if is_float(element):
            is_nan = builder.op(f"arith.cmpf uno, {x}, {x} : {element}")
            hit = builder.op(f"arith.ori {hit}, {is_nan} : i1")
        return builder.op(f"arith.select {hit}, {at}, {size} : i64")
    positions = builder.map([operand, _over(builder, best, operand.shape, [dim])],
                            operand.shape, "i64", candidate)
    first = _fold_extreme(builder, Operand.of(positions), [dim], "i64", False)
    return best, first


@imports(aten.argmax.default, aten.argmin.default, unsigned=True)
def _argmax(context, node, arguments):
    operand, dim = context.operand(arguments.self), arguments.dim
    if dim is None:  # the position among all elements
        count = 1
        for size in operand.shape:
            count = count * size
        dim = 0
        operand = Operand.of(reshape(context.builder, context.value(arguments.self), (count,)))
    _require_elements(context, operand, [dim % len(operand.shape)])
    _, first = _arg_extreme(context, operand, dim % len(operand.shape),
                            node.target is aten.argmax.default)
    return _kept(context, node, first)


@imports(aten.max.dim, aten.min.dim, unsigned=True)
def _max_dim(context, node, arguments):
    operand = context.operand(arguments.self)
    _require_elements(context, operand, [arguments.dim % len(operand.shape)])
    best, first = _arg_extreme(context, operand, arguments.dim % len(operand.shape),
                               node.target is aten.max.dim)
    shape = context.shape(node.meta["val"][0])
    return [reshape(context.builder, best, shape), reshape(context.builder, first, shape)]


@imports(aten.linalg_vector_norm.default)
def _vector_norm(context, node, arguments):
    """The square root of the sum of squares, or for order 1 the sum of absolute values."""
    if arguments.ord not in (1, 2):
        raise Unsupported(f"order {arguments.ord}; 1 and 2 are supported")
    builder, operand, element = context.builder, context.operand(arguments.self), \
        context.element(node)
    _check_rounding(operand, element)
    wide = compute_element(element)
    dims = _dims(arguments.dim, len(operand.shape))

    def add(x, total):
        part = f"arith.mulf {x}, {x}" if arguments.ord == 2 else f"math.absf {x}"
        return builder.op(f"arith.addf {total}, {builder.op(f'{part} : {wide}')} : {wide}")
    total = reduce(builder, operand, dims, wide, 0, add)
    if arguments.ord == 1:
        return _kept(context, node, round_to(builder, total, element))
    norm = builder.map([Operand.of(total)], total.shape, wide,
                       lambda x: builder.op(f"math.sqrt {x} : {wide}"))
    return _kept(context, node, round_to(builder, norm, element))
