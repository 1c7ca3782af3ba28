"""Scans along a dim: running sums, products, extremes, and sums of exponentials."""

from collections.abc import Callable

import torch

from .builder import FunctionBuilder, Operand, Value, compute_element, is_float, stored
from .reduce import round_to, unreduced
from .registry import Unsupported, imports
from .shape import extract_slice

aten = torch.ops.aten
_INF = float("inf")


def scan(builder: FunctionBuilder, source: Value, dim: int, element: str, start: float,
         body: Callable[[str, str], str]) -> Value:
    """A loop along `dim` that carries `body(x, so far)` and the result."""
    row = unreduced(source.shape, [dim])
    shape = source.shape
    total = builder.fill(builder.constant(start, element), row, element)
    result = builder.empty(shape, element)
    zero, one = builder.constant(0, "index"), builder.constant(1, "index")
    bound, _ = builder.index(shape[dim]), [builder.size(d) for d in shape]
    names, loop = builder.fresh(), builder.fresh()
    so_far, written = builder.fresh(), builder.fresh()
    types = f"{total.type}, {result.type}"
    head = (f"scf.for {loop} = {zero} to {bound} step {one} iter_args({so_far} = {total.name}, "
            f"{written} = {result.name}) -> ({types})")
    offsets = [loop if i == dim else 0 for i in range(len(shape))]
    with builder.region(head, f"{names}:2"):
        piece = extract_slice(builder, source, offsets, row, [1] * len(shape), row)
        current = Value(so_far, tuple(row), element)
        # Written over what is carried, which keeps the loop in place.
        loops = [f"d{i}" for i in range(len(row))]
        summed = builder.generic(
            len(row), [(piece, loops)], current, loops,
            lambda x, t: body(builder.convert(x, source.element, element), t),
            set(range(len(row))))
        at = ", ".join(str(o) for o in offsets)
        sizes = ", ".join(builder.size(d) for d in row)
        ones = ", ".join("1" for _ in shape)
        into = builder.op(f"tensor.insert_slice {summed.name} into {written}[{at}] [{sizes}] "
                          f"[{ones}] : {summed.type} into {result.type}")
        builder.line(f"scf.yield {summed.name}, {into} : {types}")
    return Value(f"{names}#1", shape, element)


@imports(aten.cumsum.default, aten.cumprod.default, unsigned=True)
def _cumsum(context, node, arguments):
    builder, element = context.builder, context.element(node)
    is_sum = node.target is aten.cumsum.default
    op = ("add" if is_sum else "mul") + ("f" if is_float(element) else "i")
    source = context.value(arguments.self)
    return scan(builder, source, arguments.dim % max(source.rank, 1), element, 0 if is_sum else 1,
                lambda x, total: builder.op(f"arith.{op} {total}, {x} : {stored(element)}"))


@imports(aten.logcumsumexp.default)
def _logcumsumexp(context, node, arguments):
    """max(x, y) + log(1 + exp(-|x - y|)), which loses nothing of the smaller."""
    builder, source = context.builder, context.value(arguments.self)
    element = compute_element(source.element)

    def op(name, *operands):
        return builder.op(f"{name} {', '.join(operands)} : {element}")

    def body(x, total):
        top, low = op("arith.maximumf", x, total), op("arith.minimumf", x, total)
        rest = op("math.log1p", op("math.exp", op("arith.subf", low, top)))
        # Two equal infinities have no difference.
        infinite = op("arith.cmpf oeq,", op("math.absf", low), builder.constant(_INF, element))
        equal = op("arith.cmpf oeq,", top, low)
        both = builder.op(f"arith.andi {infinite}, {equal} : i1")
        return op("arith.select", both, top, op("arith.addf", top, rest))
    total = scan(builder, source, arguments.dim % max(source.rank, 1), element, -_INF, body)
    return round_to(builder, total, source.element)


@imports(aten.cummax.default, aten.cummin.default)
def _running_extremes(context, node, arguments):
    """The extremes so far, and the last places at which they were met."""
    builder, source = context.builder, context.value(arguments.self)
    element, dim = source.element, arguments.dim % max(source.rank, 1)
    if not source.rank or element == "i1":
        raise Unsupported(f"a tensor of {source.rank} dims of {element}")
    largest = node.target is aten.cummax.default
    if is_float(element):
        op, start = ("maximumf", -_INF) if largest else ("minimumf", _INF)
    else:
        bits = int(element[1:])
        op, start = (("maxsi", -(1 << bits - 1)) if largest else ("minsi", (1 << bits - 1) - 1))
    best = scan(builder, source, dim, element, start,
                lambda x, so_far: builder.op(f"arith.{op} {so_far}, {x} : {element}"))

    def place(x, extreme):
        loop = builder.op(f"linalg.index {dim} : index")
        at = builder.op(f"arith.index_cast {loop} : index to i64")
        met = builder.op(f"arith.cmp{'f oeq' if is_float(element) else 'i eq'}, {x}, {extreme} : "
                         f"{element}")
        if is_float(element):
            is_nan = builder.op(f"arith.cmpf uno, {x}, {x} : {element}")
            met = builder.op(f"arith.ori {met}, {is_nan} : i1")
        return builder.op(f"arith.select {met}, {at}, {builder.constant(0, 'i64')} : i64")
    places = builder.map([Operand.of(source), Operand.of(best)], source.shape, "i64", place)
    return [best, scan(builder, places, dim, "i64", 0,
                       lambda x, so_far: builder.op(f"arith.maxsi {so_far}, {x} : i64"))]
