"""The experts' ops: the token of each row, and products of runs of rows."""

import sympy
import torch

from .. import experts, packing  # noqa: F401  register torch.ops.moe.token_rows and its companions
from ..ops._expert_activation import ExpertActivation
from ..ops._panels import columns, in_features, is_packed
from ..ops._quantized import Quantization
from ..ops._quantized import columns as columns_of_codes
from ..ops.grouped_linear import attributes
from ..ops.quantized_linear import attributes as quantized_attributes
from ..ops.run_quantized_experts import Quantizations
from .builder import Operand, Value, as_dim
from .moe import Clauses, _optional
from .registry import Unsupported, imports
from .shape import reshape

moe = torch.ops.moe
_ELEMENTS = ("f32", "bf16", "f16")


@imports(moe.token_rows.default)
def _token_rows(context, node, arguments):
    clauses = Clauses(context.builder).add("ins", context.value(arguments.slots))
    return clauses.write("token_rows", (context.shape(node), "i64"))[0]


@imports(moe.grouped_linear.default)
def _grouped_linear(context, node, arguments):
    w, transposed = _matrices(context, arguments.w, arguments.transposed)
    clauses = Clauses(context.builder)
    clauses.add("ins", _float(context.value(arguments.x)), w, context.value(arguments.offsets))
    clauses.add("rows", _optional(context, arguments.rows))
    clauses.add("bias", _optional(context, arguments.bias))
    _add_attributes(clauses, transposed, ExpertActivation.of(arguments))
    return clauses.write("grouped_linear", (context.shape(node), context.element(node)))[0]


@imports(moe.packed_linear.default, implied=("out_features",))
def _packed_linear(context, node, arguments):
    if arguments.groups > 1:
        return _linear_of_groups(context, node, arguments)

    def write(clauses, x, offsets):
        clauses.add("ins", x, _panels(context, arguments.w), offsets)
        _add_bias_of_one(context, clauses, arguments.bias)
        _add_attributes(clauses, False, ExpertActivation(), columns(arguments.w.meta["val"]))
    return _only_expert(context, node, arguments, write)


def _linear_of_groups(context, node, arguments):
    """The products of each group of features: their rows are gathered from x."""
    builder, shape = context.builder, context.shape(node)
    *leading, groups, out = shape
    count = as_dim(sympy.Mul(*leading))
    total = as_dim(sympy.Mul(count, groups))
    x = _float(context.value(arguments.x))
    x = reshape(builder, x, (total, x.shape[-1]))
    tokens, number = builder.index(count), builder.index(groups)

    def row():
        position = builder.op("linalg.index 0 : index")
        group = builder.op(f"arith.divui {position}, {tokens} : index")
        token = builder.op(f"arith.remui {position}, {tokens} : index")
        first = builder.op(f"arith.muli {token}, {number} : index")
        at = builder.op(f"arith.addi {first}, {group} : index")
        return builder.op(f"arith.index_cast {at} : index to i64")
    rows = builder.map([], (total,), "i64", row)
    each = builder.op(f"arith.index_cast {tokens} : index to i64")
    ends = [builder.op(f"arith.muli {each}, {builder.constant(i, 'i64')} : i64")
            for i in range(groups + 1)]
    offsets = builder.tensor(
        f"tensor.from_elements {', '.join(ends)} : tensor<{groups + 1}xi64>", (groups + 1,), "i64")
    clauses = Clauses(builder)
    panels = _panels(context, arguments.w)
    panels = reshape(builder, panels, (groups, panels.shape[1] // groups, *panels.shape[2:]))
    clauses.add("ins", x, panels, offsets)
    clauses.add("rows", rows)
    _add_attributes(clauses, False, ExpertActivation(), columns(arguments.w.meta["val"]))
    (y,) = clauses.write("grouped_linear", ((total, out), x.element))
    y = reshape(builder, y, (groups, *leading, out))
    order = (len(leading), *range(len(leading)), len(leading) + 1)
    return Operand(y, order, tuple(shape))


@imports(moe.quantized_linear.default, implied=("out_features",))
def _quantized_linear(context, node, arguments):
    def write(clauses, x, offsets):
        clauses.add("ins", x, context.value(arguments.w), offsets)
        _add_bias_of_one(context, clauses, arguments.bias)
        quantization = Quantization(arguments.format, arguments.group, arguments.activations)
        _add_quantization(context, clauses, quantization, arguments.w, arguments.scales,
                          arguments.zeros, ExpertActivation())
    return _only_expert(context, node, arguments, write)


def _only_expert(context, node, arguments, write):
    """The product of all rows of x with the weight of one expert."""
    builder, shape = context.builder, context.shape(node)
    rows = _float(context.value(arguments.x))
    count = as_dim(sympy.Mul(*shape[:-1]))
    x = reshape(builder, rows, (count, rows.shape[-1]))
    zero = builder.constant(0, "i64")
    end = builder.op(f"arith.index_cast {builder.index(count)} : index to i64")
    offsets = builder.tensor(f"tensor.from_elements {zero}, {end} : tensor<2xi64>", (2,), "i64")
    clauses = Clauses(builder)
    write(clauses, x, offsets)
    (y,) = clauses.write("grouped_linear", ((count, shape[-1]), x.element))
    return reshape(builder, y, shape)


def _add_bias_of_one(context, clauses, node):
    bias = _optional(context, node)
    clauses.add("bias", None if bias is None else
                reshape(context.builder, bias, (1, *bias.shape)))


def _add_quantization(context, clauses, quantization, w, scales, zeros, activation):
    clauses.add("scales", context.value(scales))
    clauses.add("zeros", _optional(context, zeros))
    panels = columns_of_codes(w.meta["val"])
    for name, text in quantized_attributes(quantization, panels, activation):
        clauses.attribute(name, text)


def _float(value: Value) -> Value:
    if value.element not in _ELEMENTS:
        raise Unsupported(f"experts of {value.element}; convert the model to float32")
    return value


def _matrices(context, node, transposed):
    """The experts' matrices where they lie, and whether they lie transposed there."""
    w = context.operand(node)
    if w.dims == (0, 2, 1):
        return w.value, not transposed
    return context.value(node), transposed


def _add_attributes(clauses, transposed, activation, panels=0):
    for name, text in attributes(transposed, activation, panels):
        clauses.attribute(name, text)


def _panels(context, node) -> Value:
    """A weight in panels as the op takes it: the columns of a panel are one dim."""
    w = context.value(node)
    pair = w.shape[-1:] if w.element == "bf16" else ()
    return reshape(context.builder, w, (*w.shape[:3], columns(node.meta["val"]), *pair))


@imports(moe.run_experts.default)
def _run_experts(context, node, arguments):
    activation = ExpertActivation.of(arguments)
    first = arguments.w_in.meta["val"]
    panels = columns(first) if is_packed(first) else 0
    (w_in, in_transposed), (w_out, out_transposed) = (
        (_panels(context, w), False) if panels else _matrices(context, w, arguments.transposed)
        for w in (arguments.w_in, arguments.w_out))
    hidden = in_features(arguments.w_out.meta["val"]) if panels else \
        activation.width(w_in.shape[2 if in_transposed else 1])

    def first_layer(clauses, x, offsets, tokens):
        clauses.add("ins", x, w_in, offsets).add("rows", tokens)
        clauses.add("bias", _optional(context, arguments.b_in))
        _add_attributes(clauses, in_transposed, activation, panels)

    def last_layer(clauses, x, offsets):
        clauses.add("ins", x, w_out, offsets).add("bias", _optional(context, arguments.b_out))
        _add_attributes(clauses, out_transposed, ExpertActivation(), panels)
    return _two_layers(context, node, arguments, hidden, first_layer, last_layer)


@imports(moe.run_quantized_experts.default)
def _run_quantized_experts(context, node, arguments):
    quantizations = Quantizations.of((arguments.format, arguments.group, arguments.activations,
                                      arguments.format_out, arguments.group_out))

    def first_layer(clauses, x, offsets, tokens):
        clauses.add("ins", x, context.value(arguments.w_in), offsets).add("rows", tokens)
        clauses.add("bias", _optional(context, arguments.b_in))
        _add_quantization(context, clauses, quantizations.first, arguments.w_in, arguments.scales_in,
                          arguments.zeros_in, ExpertActivation.of(arguments))

    def last_layer(clauses, x, offsets):
        clauses.add("ins", x, context.value(arguments.w_out), offsets)
        clauses.add("bias", _optional(context, arguments.b_out))
        _add_quantization(context, clauses, quantizations.last, arguments.w_out, arguments.scales_out,
                          arguments.zeros_out, ExpertActivation())
    return _two_layers(context, node, arguments, arguments.hidden, first_layer, last_layer)


def _two_layers(context, node, arguments, hidden, first_layer, last_layer):
    """Rows sent to their experts, the experts' two products, and the sum of what comes back."""
    builder, shape = context.builder, context.shape(node)
    x, indices = _float(context.value(arguments.x)), context.value(arguments.indices)
    num_experts = arguments.w_in.meta["val"].shape[0]
    count = indices.shape[0] * indices.shape[1]
    slots, offsets, _ = Clauses(builder).add("ins", indices).write(
        "dispatch", (indices.shape, "i64"), ((num_experts + 1,), "i32"), ((num_experts,), "i32"))
    tokens = Clauses(builder).add("ins", slots).write("token_rows", ((count,), "i64"))[0]
    clauses = Clauses(builder)
    first_layer(clauses, x, offsets, tokens)
    rows = clauses.write("grouped_linear", ((count, hidden), x.element))[0]
    clauses = Clauses(builder)
    last_layer(clauses, rows, offsets)
    outputs = clauses.write("grouped_linear", ((count, shape[1]), x.element))[0]
    clauses = Clauses(builder).add("ins", outputs, context.value(arguments.gates), slots)
    return clauses.write("combine", (shape, x.element))[0]
