"""Contractions: linear, matmul, mm, bmm, addmm; permuted operands are read in place."""

from collections.abc import Sequence

import torch

from ..raising.reading import value
from .builder import Dim, FunctionBuilder, Operand, Value, is_float
from .context import Context, Splat
from .registry import Unsupported, imports
from .shape import reshape

aten = torch.ops.aten


def require_one_dtype(node: torch.fx.Node) -> None:
    """Eager raises this error, too; a trace only looks at the shapes."""
    dtypes = dict.fromkeys(str(value(x).dtype).removeprefix("torch.") for x in node.all_input_nodes
                           if isinstance(value(x), torch.Tensor))
    if len(dtypes) > 1:
        raise RuntimeError(f"{node.target}: expected operands of one dtype, found "
                           f"{' and '.join(dtypes)}; cast them to one")


def contract(builder: FunctionBuilder, left: Operand, right: Operand, init: Value,
             left_loops: Sequence[str], right_loops: Sequence[str], out_loops: Sequence[str],
             loops: int) -> Value:
    """`init += left * right` over the named loops, accumulated in init's type.

    Permuted operands are read in place: `x @ w.T` walks the rows of w. What is read at one place
    alone is no dim of an operand: maps are projections, which every pattern for products knows.
    """
    element = init.element
    kind = "f" if is_float(element) else "i"

    def body(x, y, total):
        x = builder.convert(x, left.element, element)
        y = builder.convert(y, right.element, element)
        product = builder.op(f"arith.mul{kind} {x}, {y} : {element}")
        return builder.op(f"arith.add{kind} {total}, {product} : {element}")
    parallel = {int(loop[1:]) for loop in out_loops}
    return builder.generic(loops, [_without_unit_dims(builder, left, left_loops),
                                   _without_unit_dims(builder, right, right_loops)],
                           init, out_loops, body, parallel)


def _without_unit_dims(builder, operand, loops) -> tuple[Value, list[str]]:
    """An operand without the dims that are read at 0, and the loops over the others."""
    results = operand.map_results(loops)
    kept = [i for i, loop in enumerate(results) if loop != "0"]
    if not kept or len(kept) == len(results):
        return operand.value, results
    shape = [operand.value.shape[i] for i in kept]
    return reshape(builder, operand.value, shape), [results[i] for i in kept]


def accumulator(element: str) -> str:
    """Products of 16-bit floats are exact in f32, so sums are kept there."""
    return "f32" if element in ("bf16", "f16") else element


def round_to(builder: FunctionBuilder, value: Value, element: str) -> Value:
    if value.element == element:
        return value
    return builder.map([Operand.of(value)], value.shape, element,
                       lambda x: builder.convert(x, value.element, element))


def matmul(context: Context, left: Operand, right: Operand, shape: Sequence[Dim], element: str,
           init: Value | None = None) -> Value:
    """[b, m, k] x [b, k, n] or without b; `init` defaults to zeros."""
    builder = context.builder
    if init is None:
        wide = accumulator(element)
        init = builder.fill(builder.constant(0, wide), shape, wide)
    if len(shape) == 2:
        total = contract(builder, left, right, init, ["d0", "d2"], ["d2", "d1"], ["d0", "d1"], 3)
    else:
        total = contract(builder, left, right, init, ["d0", "d1", "d3"], ["d0", "d3", "d2"],
                         ["d0", "d1", "d2"], 4)
    return round_to(builder, total, element)


@imports(aten.mm.default, aten.bmm.default)
def _mm(context, node, arguments):
    require_one_dtype(node)
    right = arguments.mat2
    return matmul(context, context.operand(arguments.self), context.operand(right),
                  context.shape(node), context.element(node))


@imports(aten.addmm.default, aten.baddbmm.default)
def _addmm(context, node, arguments):
    """The products are added onto the broadcast bias."""
    require_one_dtype(node)
    if arguments.beta != 1 or arguments.alpha != 1:
        raise Unsupported("beta or alpha other than 1")
    batched = node.target is aten.baddbmm.default
    left, right = ((arguments.batch1, arguments.batch2) if batched
                   else (arguments.mat1, arguments.mat2))
    shape, wide = context.shape(node), accumulator(context.element(node))
    init = _widened_bias(context, arguments.self, shape, wide)
    return matmul(context, context.operand(left), context.operand(right), shape,
                  context.element(node), init)


def _widened_bias(context, node, shape, wide):
    """A bias broadcast to the result: the products are added onto it."""
    builder, raw = context.builder, context.raw(node)
    if isinstance(raw, Splat):
        return builder.fill(builder.convert(raw.scalar, raw.element, wide), shape, wide)
    bias = context.operand(node)
    return builder.map([bias], shape, wide, lambda x: builder.convert(x, bias.element, wide))


@imports(aten.linear.default)
def _linear(context, node, arguments):
    """x @ weight.T + bias at x's own rank: no reshapes, no transposed weight."""
    require_one_dtype(node)
    builder, shape, element = context.builder, context.shape(node), context.element(node)
    wide = accumulator(element)
    if arguments.bias is None:
        init = builder.fill(builder.constant(0, wide), shape, wide)
    else:
        init = _widened_bias(context, arguments.bias, shape, wide)
    rank = len(shape)
    loops = [f"d{i}" for i in range(rank + 1)]
    tokens, feature, width = loops[:rank - 1], loops[rank - 1], loops[rank]
    total = contract(builder, context.operand(arguments.input), context.operand(arguments.weight),
                     init, [*tokens, width], [feature, width], [*tokens, feature], rank + 1)
    return round_to(builder, total, element)


@imports(aten.matmul.default)
def _matmul(context, node, arguments):
    """Batched products of any rank; batch dimensions of size 1 are read again."""
    require_one_dtype(node)
    builder, shape, element = context.builder, context.shape(node), context.element(node)
    left, right = context.operand(arguments.self), context.operand(arguments.other)
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise Unsupported("an operand with 1 dim; use torch.mv or unsqueeze it")
    batch = len(shape) - 2
    m, n, k = f"d{batch}", f"d{batch + 1}", f"d{batch + 2}"

    def batches(operand):
        own = operand.shape[:-2]
        loops = [f"d{batch - len(own) + i}" for i in range(len(own))]
        return ["0" if size == 1 and shape[batch - len(own) + i] != 1 else loop
                for i, (size, loop) in enumerate(zip(own, loops))]
    wide = accumulator(element)
    init = builder.fill(builder.constant(0, wide), shape, wide)
    total = contract(builder, left, right, init, [*batches(left), m, k], [*batches(right), k, n],
                     [f"d{i}" for i in range(batch + 2)], batch + 3)
    return round_to(builder, total, element)


@imports(aten.mv.default)
def _mv(context, node, arguments):
    require_one_dtype(node)
    builder, shape = context.builder, context.shape(node)
    wide = accumulator(context.element(node))
    init = builder.fill(builder.constant(0, wide), shape, wide)
    total = contract(builder, context.operand(arguments.self), context.operand(arguments.vec),
                     init, ["d0", "d1"], ["d1"], ["d0"], 2)
    return round_to(builder, total, context.element(node))
