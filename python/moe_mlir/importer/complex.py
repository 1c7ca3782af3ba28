"""Complex tensors, which rotary embeddings are written with: pairs in a last dimension."""

import torch
from torch.fx import Node

from .builder import Operand, Value, compute_element
from .context import Context, broadcast
from .registry import Arguments, imports
from .shape import extract_slice, insert_slice

aten = torch.ops.aten


def _part(builder, value: Value, which: int) -> Value:
    """The real (0) or imaginary (1) parts."""
    rank = value.rank
    return extract_slice(builder, value, [*[0] * (rank - 1), which], [*value.shape[:-1], 1],
                         [1] * rank, value.shape[:-1])


def _join(builder, real: Value, imaginary: Value) -> Value:
    pairs = builder.empty((*real.shape, 2), real.element)
    for which, part in enumerate((real, imaginary)):
        pairs = insert_slice(builder, part, pairs, [*[0] * part.rank, which], [*part.shape, 1])
    return pairs


@imports(aten.view_as_complex.default, aten.view_as_real.default, complex=True)
def _same_pairs(context, node, arguments):
    return context.raw(arguments.self)


@imports(aten.polar.default, complex=True)
def _polar(context, node, arguments):
    """abs * (cos angle, sin angle)"""
    builder, element = context.builder, context.element(node)
    operands = [context.operand(arguments.abs), context.operand(arguments.angle)]

    def part(function):
        def body(length, angle):
            component = builder.op(f"math.{function} {angle} : {element}")
            return builder.op(f"arith.mulf {length}, {component} : {element}")
        return builder.map(operands, context.shape(node)[:-1], element, body)
    return _join(builder, part("cos"), part("sin"))


def product(context: Context, node: Node, arguments: Arguments) -> Value:
    """(a + ib)(c + id) = (ac - bd) + i(ad + bc)"""
    builder, element = context.builder, compute_element(context.element(node))
    shape = context.shape(node)[:-1]
    (a, b), (c, d) = ([_part(builder, context.value(x), i) for i in (0, 1)]
                      for x in (arguments.self, arguments.other))

    def combine(first, second, third, fourth, sign):
        operands = [broadcast(Operand.of(v), shape) for v in (first, second, third, fourth)]

        def body(w, x, y, z):
            left = builder.op(f"arith.mulf {w}, {x} : {element}")
            right = builder.op(f"arith.mulf {y}, {z} : {element}")
            return builder.op(f"arith.{sign} {left}, {right} : {element}")
        return builder.map(operands, shape, element, body)
    return _join(builder, combine(a, c, b, d, "subf"), combine(a, d, b, c, "addf"))
