"""The experts' ops: the token of each row, and contractions over runs of rows."""

import torch

from .. import experts  # noqa: F401  registers torch.ops.moe.token_rows and its companions
from .builder import Operand, Value
from .matmul import accumulator, contract, round_to
from .registry import imports
from .shape import extract_slice

moe = torch.ops.moe


def _read(builder, tensor: Value, *at: str) -> str:
    return builder.op(f"tensor.extract {tensor.name}[{', '.join(at)}] : {tensor.type}")


def _as_index(builder, scalar: str, element: str) -> str:
    return builder.op(f"arith.index_cast {scalar} : {element} to index")


@imports(moe.token_rows.default)
def _token_rows(context, node, arguments):
    """One scf.forall over choices: each writes its token where its row is, if it has one."""
    builder = context.builder
    slots = context.value(arguments.slots)
    tokens, choices = (builder.size(d) for d in slots.shape)
    rows = builder.fill(builder.constant(0, "i64"), context.shape(node), "i64")
    zero, one = builder.constant(0, "index"), builder.constant(1, "index")
    result, token, choice, shared = (builder.fresh() for _ in range(4))
    with builder.region(f"scf.forall ({token}, {choice}) in ({tokens}, {choices}) "
                        f"shared_outs({shared} = {rows.name}) -> ({rows.type})", result):
        slot = _as_index(builder, _read(builder, slots, token, choice), "i64")
        valid = builder.op(f"arith.cmpi sge, {slot}, {zero} : index")
        at = builder.op(f"arith.maxsi {slot}, {zero} : index")
        # No row of its own: the place of no element.
        count = builder.op(f"arith.select {valid}, {one}, {zero} : index")
        place = builder.op(f"tensor.extract_slice {shared}[{at}] [{count}] [1] : {rows.type} to "
                           "tensor<?xi64>")
        number = builder.op(f"arith.index_cast {token} : index to i64")
        written = builder.op(f"linalg.fill ins({number} : i64) outs({place} : tensor<?xi64>) -> "
                             "tensor<?xi64>")
        with builder.region("scf.forall.in_parallel"):
            builder.line(f"tensor.parallel_insert_slice {written} into {shared}[{at}] [{count}] "
                         f"[1] : tensor<?xi64> into {rows.type}")
    return Value(result, rows.shape, "i64")


@imports(moe.grouped_linear.default)
def _grouped_linear(context, node, arguments):
    """One scf.forall over experts: each writes its own run of rows, so they may run at once."""
    builder, shape, element = context.builder, context.shape(node), context.element(node)
    x, offsets = context.value(arguments.x), context.value(arguments.offsets)
    w, transposed = _matrices(context, arguments.w)
    bias = None if arguments.bias is None else context.value(arguments.bias)
    wide = accumulator(element)
    zeros = builder.fill(builder.constant(0, wide), shape, wide)
    one = builder.constant(1, "index")
    result, expert, shared = builder.fresh(), builder.fresh(), builder.fresh()
    head = (f"scf.forall ({expert}) in ({w.shape[0]}) shared_outs({shared} = {zeros.name}) "
            f"-> ({zeros.type})")
    with builder.region(head, result):
        following = builder.op(f"arith.addi {expert}, {one} : index")
        begin, end = (_as_index(builder, _read(builder, offsets, at), "i64")
                      for at in (expert, following))
        rows = builder.op(f"arith.subi {end}, {begin} : index")
        mine = _run_of_rows(builder, x, begin, rows)
        out = _run_of_rows(builder, Value(shared, zeros.shape, wide), begin, rows)
        weight = extract_slice(builder, w, [expert, 0, 0], [1, *w.shape[1:]], [1, 1, 1],
                               w.shape[1:])
        read = ["d2", "d1"] if transposed else ["d1", "d2"]
        init = out if bias is None else _bias_rows(builder, bias, expert, out, wide)
        product = contract(builder, Operand.of(mine), Operand.of(weight), init,
                           ["d0", "d2"], read, ["d0", "d1"], 3)
        with builder.region("scf.forall.in_parallel"):
            builder.line(f"tensor.parallel_insert_slice {product.name} into {shared}[{begin}, 0] "
                         f"[{rows}, {shape[1]}] [1, 1] : {product.type} into {zeros.type}")
    total = Value(result, shape, wide)
    return round_to(builder, total, element)


def _matrices(context, node):
    """The experts' matrices where they lie, and whether they lie transposed there."""
    w = context.operand(node)
    if w.dims == (0, 2, 1):
        return w.value, True
    return context.value(node), False


def _run_of_rows(builder, tensor: Value, begin: str, rows: str) -> Value:
    width = tensor.shape[1]
    run = "?x" + (str(width) if isinstance(width, int) else "?")
    type_ = f"tensor<{run}x{tensor.element}>"
    name = builder.op(f"tensor.extract_slice {tensor.name}[{begin}, 0] [{rows}, "
                      f"{builder.size(width)}] [1, 1] : {tensor.type} to {type_}")
    return Value(name, (_RunLength(rows), width), tensor.element)


class _RunLength(str):
    """The number of rows of a run: a size that only the running program knows."""


def _bias_rows(builder, bias: Value, expert: str, out: Value, wide: str) -> Value:
    row = extract_slice(builder, bias, [expert, 0], [1, bias.shape[1]], [1, 1], bias.shape[1:])
    return builder.generic(2, [(row, ["d1"])], out, ["d0", "d1"],
                           lambda b, _: builder.convert(b, bias.element, wide), {0, 1})
