"""The ops around a router: full selection, dispatch and combine, losses."""

import torch

from .moe import Clauses, _bool, _flat, _optional, _rows, _scalar_operand, _widened, float_attribute
from .registry import imports
from .shape import reshape

moe = torch.ops.moe


def _index_element(tensor) -> str:
    return "i32" if tensor.dtype == torch.int32 else "i64"


def _integer_operand(context, node):
    """A 0-d i32 tensor as the scalar that the op takes."""
    if node is None:
        return None
    value = context.value(node)
    return context.builder.op(f"tensor.extract {value.name}[] : {value.type}"), "i32"


@imports(moe.grouped_topk.default, implied=("k", "index_dtype"))
def _grouped_topk(context, node, arguments):
    gates, indices = node.meta["val"]
    clauses = Clauses(context.builder).add("ins", context.value(arguments.scores))
    clauses.add("bias", _optional(context, arguments.bias))
    clauses.add("forced", _optional(context, arguments.forced))
    clauses.add("mask", _optional(context, arguments.mask))
    clauses.add("num_valid", _integer_operand(context, arguments.num_valid))
    kind = "probs" if arguments.score == "none" else "logits"
    clauses.attribute("kind", f"#moe.score_kind<{kind}>")
    clauses.attribute("score", f"#moe.score_function<{arguments.score}>")
    clauses.attribute("n_group", f"{arguments.n_group} : i64")
    clauses.attribute("topk_group", f"{arguments.topk_group} : i64")
    value = "max" if arguments.group_score == "max" else "top2_sum"
    clauses.attribute("group_score", f"#moe.group_score<{value}>")
    clauses.attribute("renorm", _bool(arguments.renorm))
    clauses.attribute("eps", float_attribute(arguments.eps))
    clauses.attribute("route_scale", float_attribute(arguments.route_scale))
    return clauses.write("topk_renorm", (context.shape(gates), "f32"),
                         (context.shape(indices), _index_element(indices)))


@imports(moe.threshold_renorm.default)
def _threshold_renorm(context, node, arguments):
    gates, count = node.meta["val"]
    clauses = Clauses(context.builder).add("ins", context.value(arguments.p))
    clauses.add("theta", _scalar_operand(context, arguments.theta_value))
    clauses.add("mask", _optional(context, arguments.mask))
    if arguments.theta_value is None:
        clauses.attribute("theta", float_attribute(arguments.theta))
    clauses.attribute("renorm", _bool(arguments.renorm))
    dense, number = clauses.write("threshold_renorm", (context.shape(gates), "f32"),
                                  (context.shape(count), "i32"))
    return [dense, _widened(context, number, "i64")]


@imports(moe.densify.default, implied=("num_experts",))
def _densify(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.gates), context.value(arguments.indices))
    return clauses.write("densify", (context.shape(node), "f32"))[0]


@imports(moe.make_finite.default)
def _make_finite(context, node, arguments):
    clauses = Clauses(context.builder).add("ins", context.value(arguments.scores))
    clauses.attribute("scope", f"#moe.finite_scope<{arguments.scope}>")
    return clauses.write("make_finite", (context.shape(node), "f32"))[0]


@imports(moe.dispatch.default, implied=("num_experts",))
def _dispatch(context, node, arguments):
    slots, offsets, counts = (context.shape(v) for v in node.meta["val"])
    builder = context.builder
    idx = _rows(context, context.value(arguments.idx), 1)
    clauses = Clauses(builder).add("ins", idx)
    clauses.add("priority", _flat(context, _optional(context, arguments.priority)))
    clauses.add("gates", _rows(context, _optional(context, arguments.gates), 1))
    clauses.add("expert_map", _optional(context, arguments.expert_map))
    if arguments.capacity is not None:
        index = builder.index(context.dim(arguments.capacity))
        clauses.add("capacity", (builder.op(f"arith.index_cast {index} : index to i32"), "i32"))
    clauses.add("mask", _flat(context, _optional(context, arguments.mask)))
    rule = ("priority" if arguments.priority is not None
            else "probs" if arguments.gates is not None else "position")
    clauses.attribute("drop", f"#moe.drop<{rule}>")
    if arguments.capacity_factor is not None:
        clauses.attribute("capacity_factor", float_attribute(arguments.capacity_factor))
    clauses.attribute("alignment", f"{arguments.alignment} : i64")
    rows, starts, numbers = clauses.write("dispatch", (idx.shape, "i64"), (offsets, "i64"),
                                          (counts, "i64"))
    return [reshape(builder, rows, slots), starts, numbers]


@imports(moe.combine.default)
def _combine(context, node, arguments):
    expert_out = context.value(arguments.expert_out)
    clauses = Clauses(context.builder)
    clauses.add("ins", expert_out, context.value(arguments.gates), context.value(arguments.slots))
    clauses.add("shared", _optional(context, arguments.shared))
    return clauses.write("combine", (context.shape(node), expert_out.element))[0]


@imports(moe.soft_dispatch.default)
def _soft_dispatch(context, node, arguments):
    shapes = [(context.shape(v), "f32") for v in node.meta["val"]]
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.x), context.value(arguments.phi))
    clauses.add("metric", _optional(context, arguments.m))
    clauses.add("scale", _scalar_operand(context, arguments.scale_value))
    clauses.add("mask", _optional(context, arguments.mask))
    if arguments.scale_value is None:
        clauses.attribute("scale", float_attribute(arguments.scale))
    clauses.attribute("eps", float_attribute(arguments.eps))
    return clauses.write("soft_dispatch", *shapes)


@imports(moe.balance_loss.default)
def _balance_loss(context, node, arguments):
    _, load = node.meta["val"]
    clauses = Clauses(context.builder)
    clauses.add("ins", _rows(context, context.value(arguments.p), 1),
                _rows(context, context.value(arguments.idx), 1))
    clauses.add("mask", _flat(context, _optional(context, arguments.mask)))
    clauses.attribute("divisor", f"#moe.loss_divisor<{arguments.divide_by}>")
    loss, number = clauses.write("balance_loss", ((), "f32"), (context.shape(load), "i32"))
    return [loss, _widened(context, number, "i64")]


@imports(moe.z_loss.default)
def _z_loss(context, node, arguments):
    _, lse = node.meta["val"]
    z = _rows(context, context.value(arguments.z), 1)
    clauses = Clauses(context.builder).add("ins", z)
    clauses.add("mask", _flat(context, _optional(context, arguments.mask)))
    loss, sums = clauses.write("z_loss", ((), "f32"), (z.shape[:1], "f32"))
    return [loss, reshape(context.builder, sums, context.shape(lse))]


@imports(moe.bias_update.default)
def _bias_update(context, node, arguments):
    clauses = Clauses(context.builder)
    clauses.add("ins", context.value(arguments.bias), context.value(arguments.counts))
    clauses.attribute("gamma", float_attribute(arguments.gamma))
    return clauses.write("bias_update", (context.shape(node), "f32"))[0]
