"""The routing ops: each torch.ops.moe.<name> becomes one moe.<name>."""

import math
from collections.abc import Sequence
from typing import overload

import sympy
import torch

from .. import ops  # noqa: F401  registers torch.ops.moe.*
from ..ops._kernel import visibility
from .builder import Dim, FunctionBuilder, Operand, Value, as_dim
from .registry import Unsupported, imports
from .shape import reshape

moe = torch.ops.moe


class Clauses:
    """The assembly form that all moe ops share: `name(values : types)` groups."""

    def __init__(self, builder: FunctionBuilder) -> None:
        self.builder = builder
        self._groups: dict[str, list] = {}
        self._attributes: list[str] = []

    def add(self, clause: str, *values: Value | tuple[str, str] | None) -> "Clauses":
        """Values are tensors, (scalar name, type) pairs, or None where absent."""
        for value in values:
            if value is not None:
                pair = (value.name, value.type) if isinstance(value, Value) else value
                self._groups.setdefault(clause, []).append(pair)
        return self

    def attribute(self, name: str, text: str | None) -> "Clauses":
        if text is not None:
            self._attributes.append(f"{name} = {text}")
        return self

    def write(self, op: str, *results: tuple[Sequence[Dim], str]) -> list[Value]:
        """`results` are (shape, element) of the destinations."""
        inits = [self.builder.empty(shape, element) for shape, element in results]
        self.add("outs", *inits)
        groups = " ".join(
            f"{name}({', '.join(n for n, _ in group)} : {', '.join(t for _, t in group)})"
            for name, group in self._groups.items())
        attributes = f" {{{', '.join(self._attributes)}}}" if self._attributes else ""
        types = ", ".join(init.type for init in inits)
        text = f"moe.{op} {groups}{attributes} -> {types}"
        names = [self.builder.op(text)] if len(inits) == 1 else self.builder.ops(text, len(inits))
        return [Value(name, init.shape, init.element) for name, init in zip(names, inits)]


def float_attribute(value: float) -> str:
    return f"{float(value):.17e} : f64"


def _bool(value) -> str:
    return "true" if value else "false"


def _optional(context, node):
    return None if node is None else context.value(node)


def _scalar_operand(context, node):
    """A 0-d tensor as the f32 scalar that the op takes."""
    if node is None:
        return None
    value = context.value(node)
    name = context.builder.op(f"tensor.extract {value.name}[] : {value.type}")
    return context.builder.convert(name, value.element, "f32"), "f32"


def _widened(context, value: Value, element: str) -> Value:
    if value.element == element:
        return value
    builder = context.builder
    return builder.map([Operand.of(value)], value.shape, element,
                       lambda x: builder.convert(x, value.element, element))


@overload
def _rows(context, value: Value, kept: int) -> Value: ...
@overload
def _rows(context, value: Value | None, kept: int) -> Value | None: ...
def _rows(context, value, kept):
    """The value with all but its last `kept` dimensions joined into one."""
    if value is None:
        return None
    leading = 1
    for d in value.shape[:value.rank - kept]:
        leading = leading * d
    return reshape(context.builder, value, (leading, *value.shape[value.rank - kept:]))


@imports(moe.router_logits.default)
def _router_logits(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.h), context.value(arguments.weight))
    clauses.add("bias", _optional(context, arguments.bias))
    return clauses.write("router_logits", (context.shape(node), "f32"))[0]


@imports(moe.cosine_logits.default)
def _cosine_logits(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.h), context.value(arguments.emb))
    clauses.add("omega", _optional(context, arguments.omega))
    clauses.add("tau", _scalar_operand(context, arguments.tau_value))
    if arguments.tau_value is None:
        clauses.attribute("tau", float_attribute(arguments.tau))
    clauses.attribute("eps", float_attribute(arguments.eps))
    clauses.attribute("norm_token", _bool(arguments.norm_token))
    clauses.attribute("norm_emb", _bool(arguments.norm_emb))
    return clauses.write("cosine_logits", (context.shape(node), "f32"))[0]


@imports(moe.hyper_router.default, implied=("num_experts",))
def _hyper_router(context, node, arguments):
    weight, bias = node.meta["val"]
    clauses = Clauses(context.builder).add("ins", *(
        context.value(x) for x in (arguments.e, arguments.w1, arguments.b1, arguments.w2,
                                   arguments.b2)))
    return clauses.write("hyper_router", (context.shape(weight), "f32"),
                         (context.shape(bias), "f32"))


@imports(moe.ac_logits.default)
def _ac_logits(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", *(context.value(x) for x in (arguments.h, arguments.m, arguments.prev_idx,
                                                  arguments.emb)))
    clauses.add("gates", _optional(context, arguments.prev_gates))
    clauses.add("bias", _optional(context, arguments.bias))
    return clauses.write("ac_logits", (context.shape(node), "f32"))[0]


@imports(moe.topk_renorm.default, implied=("k", "index_dtype"))
def _topk_renorm(context, node, arguments):
    gates, indices = node.meta["val"]
    clauses = Clauses(context.builder).add("ins", context.value(arguments.scores))
    clauses.add("mask", _optional(context, arguments.mask))
    clauses.attribute("kind", f"#moe.score_kind<{arguments.kind}>")
    clauses.attribute("renorm", _bool(arguments.renorm))
    if arguments.route_scale != 1.0:
        clauses.attribute("route_scale", float_attribute(arguments.route_scale))
    index = "i32" if indices.dtype == torch.int32 else "i64"
    return clauses.write("topk_renorm", (context.shape(gates), "f32"),
                         (context.shape(indices), index))


@imports(torch.ops.aten.topk.default, implied=("k", "sorted"))
def _topk(context, node, arguments):
    """A plain top-k, as torch's: NaN is larger than any number, and is taken once."""
    values, indices = node.meta["val"]
    rank = len(context.shape(values))
    if arguments.dim % rank != rank - 1 or not arguments.largest:
        raise Unsupported("a dim other than the last, or largest=False")
    source = context.value(arguments.self)
    if source.element not in ("f32", "bf16", "f16"):
        raise Unsupported(f"element type {source.element}")
    context.require(context.shape(values)[-1], "<=", source.shape[-1])
    clauses = Clauses(context.builder).add("ins", _order_of_topk(context.builder, source))
    clauses.attribute("kind", "#moe.score_kind<probs>").attribute("renorm", "false")
    _, order = clauses.write("topk_renorm", (context.shape(values), "f32"),
                             (context.shape(indices), "i64"))
    return [_at_indices(context.builder, source, order), order]


def _order_of_topk(builder, source: Value) -> Value:
    """Scores in torch's order without a NaN, of which the op gives no value.

    NaN becomes infinity, and a positive number the one before it, so that NaN comes before
    infinity. Only the smallest of all, 2^-149, is not told from 0 then.
    """
    def body(x):
        x = builder.convert(x, source.element, "f32")
        bits = builder.op(f"arith.bitcast {x} : f32 to i32")
        before = builder.op(f"arith.subi {bits}, {builder.constant(1, 'i32')} : i32")
        before = builder.op(f"arith.bitcast {before} : i32 to f32")
        positive = builder.op(f"arith.cmpf ogt, {x}, {builder.constant(0, 'f32')} : f32")
        number = builder.op(f"arith.select {positive}, {before}, {x} : f32")
        is_nan = builder.op(f"arith.cmpf uno, {x}, {x} : f32")
        largest = builder.constant(math.inf, "f32")
        return builder.op(f"arith.select {is_nan}, {largest}, {number} : f32")
    return builder.map([Operand.of(source)], source.shape, "f32", body)


def _at_indices(builder, source: Value, indices: Value) -> Value:
    """The elements of the last dim that a selection chose."""
    def body(scalar):
        at = [builder.op(f"linalg.index {i} : index") for i in range(source.rank - 1)]
        at.append(builder.op(f"arith.index_cast {scalar} : i64 to index"))
        return builder.op(f"tensor.extract {source.name}[{', '.join(at)}] : {source.type}")
    return builder.map([Operand.of(indices)], indices.shape, source.element, body)


@imports(moe.similarity_inform.default)
def _similarity_inform(context, node, arguments):
    p, lse = node.meta["val"]
    builder = context.builder
    u, e = (_rows(context, context.value(x), 2) for x in (arguments.u, arguments.e))
    uk = _rows(context, _optional(context, arguments.uk), 2)
    clauses = Clauses(builder).add("ins", u, e).add("keys", uk)
    clauses.add("ws", _optional(context, arguments.ws))
    clauses.add("mask", _rows(context, _optional(context, arguments.mask), 1))
    clauses.add("tau", _scalar_operand(context, arguments.tau_value))
    clauses.attribute("visibility", visibility(arguments.causal, arguments.window))
    if arguments.tau_value is None:
        clauses.attribute("tau", float_attribute(arguments.tau))
    clauses.attribute("restrict", f"#moe.restrict<{arguments.restrict}>")
    clauses.attribute("precision", f"#moe.precision<{arguments.precision}>")
    mixed, sums = clauses.write("similarity_inform",
                                ((*u.shape[:2], e.shape[-1]), "f32"), (u.shape[:2], "f32"))
    return [reshape(builder, mixed, context.shape(p)), reshape(builder, sums, context.shape(lse))]


def _pair_attributes(clauses: Clauses, arguments) -> None:
    """What decides the logits of a query and a key, and who sees whom."""
    if arguments.scale is not None:
        clauses.attribute("scale", float_attribute(arguments.scale))
    clauses.attribute("visibility", visibility(arguments.causal, arguments.window,
                                               arguments.exclude_self))
    clauses.attribute("precision", f"#moe.precision<{arguments.precision}>")


@imports(moe.attention_posterior.default)
def _attention_posterior(context, node, arguments):
    p, head, prior, posterior = node.meta["val"]
    clauses = Clauses(context.builder)
    clauses.add("ins", *(context.value(x) for x in (arguments.q, arguments.k, arguments.u,
                                                  arguments.e)))
    clauses.add("means", _optional(context, arguments.vp))
    clauses.add("values", _optional(context, arguments.v), _optional(context, arguments.wo))
    clauses.add("bias", _four_dims(context, _optional(context, arguments.bias)))
    clauses.add("head_prior", _optional(context, arguments.head_prior))
    _pair_masks(context, clauses, arguments, arguments.query_mask)
    clauses.add("rows", _optional(context, arguments.row_lse),
                _optional(context, arguments.row_entropy))
    clauses.add("sigma", _scalar_operand(context, arguments.sigma_value))
    if arguments.sigma_value is None:
        clauses.attribute("sigma", float_attribute(arguments.sigma))
    clauses.attribute("head_mode", f"#moe.head_mode<{arguments.head_mode}>")
    clauses.attribute("head_scope", f"#moe.head_scope<{arguments.head_scope}>")
    if arguments.head is not None:
        clauses.attribute("head", f"{arguments.head} : i64")
    _pair_attributes(clauses, arguments)
    results = clauses.write("attention_posterior", (context.shape(p), "f32"),
                            (context.shape(head), "i32"), (context.shape(prior), "f32"),
                            (context.shape(posterior), "f32"))
    return [results[0], _widened(context, results[1], "i64"), *results[2:]]


@imports(moe.attention_entropy.default)
def _attention_entropy(context, node, arguments):
    entropy, rows = node.meta["val"]
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.q), context.value(arguments.k))
    clauses.add("bias", _four_dims(context, _optional(context, arguments.bias)))
    _pair_masks(context, clauses, arguments)
    _pair_attributes(clauses, arguments)
    return clauses.write("attention_entropy", (context.shape(entropy), "f32"),
                         (context.shape(rows), "f32"))


@imports(moe.attention.default)
def _attention(context, node, arguments):
    """A mix of values of each head; its result is rounded to q's type."""
    out, row_lse, row_entropy = node.meta["val"]
    q, k, v = (context.value(x) for x in (arguments.q, arguments.k, arguments.v))
    clauses = Clauses(context.builder).add("ins", q, k).add("values", v)
    clauses.add("bias", _four_dims(context, _optional(context, arguments.bias)))
    _pair_masks(context, clauses, arguments)
    if arguments.scale is None:
        # The posterior and the entropies know the default, a mix of any values does not.
        clauses.attribute("scale", float_attribute(1 / math.sqrt(q.shape[-1])))
    _pair_attributes(clauses, arguments)
    clauses.attribute("with_entropy", "true")
    mixed, *rows = clauses.write("softmax_mix", (context.shape(out), "f32"),
                                 (context.shape(row_lse), "f32"),
                                 (context.shape(row_entropy), "f32"))
    return [_widened(context, mixed, q.element), *rows]


def _pair_masks(context, clauses: Clauses, arguments, query_mask=None) -> None:
    """The masks of queries and keys; that of the keys is the queries' too for as many of them."""
    mask, query_mask = _optional(context, arguments.mask), _optional(context, query_mask)
    if query_mask is None and mask is not None:
        q, k = context.value(arguments.q), context.value(arguments.k)
        query_mask = mask if _are_same_tokens(q, k) else None
    clauses.add("query_mask", query_mask).add("key_mask", mask)


def _are_same_tokens(q: Value, k: Value) -> bool:
    """Whether a mask of the keys covers the queries too, which their counts say."""
    difference = as_dim(sympy.expand(sympy.sympify(q.shape[2]) - sympy.sympify(k.shape[2])))
    if not isinstance(difference, int):
        raise Unsupported(f"a mask where the number of queries ({q.shape[2]}) may or may not be "
                          f"that of keys ({k.shape[2]}); give both one size, or a 'query_mask' "
                          "where the op takes one, or put the mask into the bias")
    return difference == 0


def _four_dims(context, bias: Value | None) -> Value | None:
    """A bias as `[batch or 1, heads or 1, n, nk]`."""
    if bias is None or bias.rank == 4:
        return bias
    return reshape(context.builder, bias, (1,) * (4 - bias.rank) + bias.shape)


@imports(moe.mad_dispersion.default, implied=("num_experts",))
def _mad_dispersion(context, node, arguments):
    s, mean, count = (context.shape(v) for v in node.meta["val"])
    assign, mask = (_optional(context, x) for x in (arguments.assign, arguments.mask))
    clauses = Clauses(context.builder)
    clauses.add("ins", _rows(context, context.value(arguments.h), 1), _flat(context, assign))
    clauses.add("mask", _flat(context, mask))
    clauses.attribute("measure", f"#moe.dispersion_measure<{arguments.measure}>")
    spread, center, number = clauses.write("mad_dispersion", (s, "f32"), (mean, "f32"),
                                           (count, "i32"))
    return [spread, center, _widened(context, number, "i64")]


def _flat(context, value: Value | None) -> Value | None:
    return _rows(context, value, 0)


@imports(moe.dispersion_weights.default)
def _dispersion_weights(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.s), context.value(arguments.count))
    clauses.attribute("eps", float_attribute(arguments.eps))
    if arguments.clamp is not None:
        clauses.attribute("clamp", float_attribute(arguments.clamp))
    clauses.attribute("scale", f"#moe.dispersion_scale<{arguments.scale}>")
    clauses.attribute("include_empty", _bool(arguments.include_empty))
    return clauses.write("dispersion_weights", (context.shape(node), "f32"))[0]


@imports(moe.adjacency_gate.default)
def _adjacency_gate(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.p), context.value(arguments.a))
    clauses.attribute("threshold", float_attribute(arguments.threshold))
    clauses.attribute("cold_start", f"#moe.cold_start<{arguments.cold_start}>")
    return clauses.write("adjacency_gate", (context.shape(node), "f32"))[0]


@imports(moe.adjacency_update.default)
def _adjacency_update(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.a),
                _rows(context, context.value(arguments.idx), 1))
    clauses.add("mask", _flat(context, _optional(context, arguments.mask)))
    clauses.attribute("beta", float_attribute(arguments.beta))
    clauses.attribute("norm", f"#moe.adjacency_norm<{arguments.norm}>")
    clauses.attribute("diagonal", _bool(arguments.diagonal))
    return clauses.write("adjacency_update", (context.shape(node), "f32"))[0]
