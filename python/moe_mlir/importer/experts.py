"""The experts' ops: the token of each row, and contractions over runs of rows."""

import torch

from .. import experts  # noqa: F401  registers torch.ops.moe.token_rows and its companions
from .builder import Operand, Value
from .matmul import accumulator, contract, round_to
from .registry import imports
from .shape import extract_slice

moe = torch.ops.moe


class _Loop:
    """scf.for over [0, bound) that carries tensors; `with` writes the body."""

    def __init__(self, builder, bound: str, carried: list[Value]):
        self.builder = builder
        zero, one = builder.constant(0, "index"), builder.constant(1, "index")
        self.index = builder.fresh()
        self.values = [Value(builder.fresh(), v.shape, v.element) for v in carried]
        self._types = ", ".join(v.type for v in carried)
        self._name = builder.fresh()
        arguments = ", ".join(f"{inner.name} = {outer.name}"
                              for inner, outer in zip(self.values, carried))
        head = (f"scf.for {self.index} = {zero} to {bound} step {one} "
                f"iter_args({arguments}) -> ({self._types})")
        count = len(carried)
        self._region = builder.region(head, self._name if count == 1 else f"{self._name}:{count}")
        names = [self._name] if count == 1 else [f"{self._name}#{i}" for i in range(count)]
        self.results = [Value(n, v.shape, v.element) for n, v in zip(names, carried)]

    def __enter__(self):
        self._region.__enter__()
        return self

    def yields(self, *values: Value):
        self.builder.line(f"scf.yield {', '.join(v.name for v in values)} : {self._types}")

    def __exit__(self, *error):
        return self._region.__exit__(*error)


def _read(builder, tensor: Value, *at: str) -> str:
    return builder.op(f"tensor.extract {tensor.name}[{', '.join(at)}] : {tensor.type}")


def _write(builder, scalar: str, tensor: Value, *at: str) -> Value:
    name = builder.op(f"tensor.insert {scalar} into {tensor.name}[{', '.join(at)}] : "
                      f"{tensor.type}")
    return Value(name, tensor.shape, tensor.element)


def _as_index(builder, scalar: str, element: str) -> str:
    return builder.op(f"arith.index_cast {scalar} : {element} to index")


def _if_valid(builder, expert: str, element: str, carried: list[Value], body) -> list[Value]:
    """`carried` changed by `body(position)` where the expert is not -1."""
    zero = builder.constant(0, element)
    valid = builder.op(f"arith.cmpi sge, {expert}, {zero} : {element}")
    types = ", ".join(v.type for v in carried)
    name = builder.fresh()
    count = len(carried)
    with builder.region(f"scf.if {valid} -> ({types})", name if count == 1 else f"{name}:{count}",
                        f"else {{ scf.yield {', '.join(v.name for v in carried)} : {types} }}"):
        changed = body(_as_index(builder, expert, element))
        builder.line(f"scf.yield {', '.join(v.name for v in changed)} : {types}")
    names = [name] if count == 1 else [f"{name}#{i}" for i in range(count)]
    return [Value(n, v.shape, v.element) for n, v in zip(names, carried)]


@imports(moe.token_rows.default)
def _token_rows(context, node, arguments):
    builder = context.builder
    slots = context.value(arguments.slots)
    tokens, choices = (builder.index(d) for d in slots.shape)
    rows = builder.fill(builder.constant(0, "i64"), context.shape(node), "i64")
    with _Loop(builder, tokens, [rows]) as outer:
        token = builder.op(f"arith.index_cast {outer.index} : index to i64")
        with _Loop(builder, choices, outer.values) as inner:
            slot = _read(builder, slots, outer.index, inner.index)
            inner.yields(*_if_valid(builder, slot, "i64", inner.values,
                                    lambda at: [_write(builder, token, inner.values[0], at)]))
        outer.yields(*inner.results)
    return outer.results[0]


@imports(moe.grouped_linear.default)
def _grouped_linear(context, node, arguments):
    """One scf.forall over experts: each writes its own run of rows, so they may run at once."""
    builder, shape, element = context.builder, context.shape(node), context.element(node)
    x, offsets = context.value(arguments.x), context.value(arguments.offsets)
    w, turned = _matrices(context, arguments.w)
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
        read = ["d2", "d1"] if turned else ["d1", "d2"]
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
