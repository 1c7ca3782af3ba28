"""Whether gates can be negative, by the graph that computes them.

onnxruntime's nodes weigh experts by a softmax: an expert of a negative gate is one that a token has
not. So gates are proven not to be negative; NaN is no matter here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..graph.arguments import bind_arguments

# By names of operators without overloads. What they return is never negative.
_ALWAYS = {"softmax", "_softmax", "sigmoid", "exp", "exp2", "relu", "abs", "sqrt", "softplus",
           "square", "one_hot", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "logical_not"}
# Never negative where their first argument is not, or all that it lists are not.
_KEEP = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze",
         "expand", "expand_as", "permute", "transpose", "t", "alias", "clone", "contiguous",
         "detach", "detach_", "to", "_to_copy", "type_as", "slice", "select", "narrow", "gather",
         "index_select", "index", "take_along_dim", "topk", "sort", "cat", "stack", "repeat",
         "repeat_interleave", "concat", "concatenate", "sum", "mean", "amax", "amin", "max", "min", "cumsum", "pow", "split",
         "chunk", "unbind", "copy", "lift_fresh_copy", "zeros_like", "new_zeros", "zeros",
         "round", "floor", "clamp_max"}
# Never negative where none of their operands is.
_BOTH = {"add", "mul", "div", "maximum", "minimum", "true_divide", "matmul", "mm", "bmm"}
_PLACES = {"scatter", "scatter_add", "scatter_reduce", "masked_fill", "where", "index_put"}


def is_nonnegative(value: Any, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a node of a graph without writes in place has no negative elements.

    Args:
        tensors: weights and constants by the names of their placeholders.
    """
    return _Proof(tensors).holds(value)


class _Proof:
    def __init__(self, tensors):
        self._tensors, self._known = tensors, {}

    def holds(self, value) -> bool:
        if isinstance(value, list | tuple):
            return all(map(self.holds, value))
        if not isinstance(value, Node):
            return isinstance(value, int | float) and not value < 0
        if value not in self._known:
            self._known[value] = self._of_node(value)
        return self._known[value]

    def _of_node(self, node) -> bool:
        if node.op == "placeholder":
            tensor = self._tensors.get(node.name)
            return tensor is not None and bool((tensor >= 0).all())
        if node.target is operator.getitem:
            return self.holds(node.args[0])
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return False
        name, given = schema.name.partition("::")[2], bind_arguments(node)
        if name in _ALWAYS:
            return True
        if name in _KEEP:
            return not node.all_input_nodes or self.holds(node.args[0])
        if name in _BOTH:
            return self.holds(node.args[0]) and self.holds(node.args[1])
        return self._of_choice(name, node, given)

    def _of_choice(self, name, node, given) -> bool:
        """Of operators whose operands are no mere list."""
        if name in _PLACES:
            # Booleans and places among the operands are whole numbers of their own.
            return all(map(self.holds, (x for x in _values_of(name, node, given) if x is not None)))
        if name in ("full", "full_like", "new_full", "scalar_tensor"):
            return self.holds(node.args[-1])
        if name in ("clamp", "clamp_min"):
            return given.min is not None and self.holds(given.min) or self.holds(node.args[0])
        if name in ("topk_renorm", "grouped_topk"):
            of_scores = given.kind == "probs" if name == "topk_renorm" else given.score == "none"
            return given.route_scale >= 0 and (not of_scores or self.holds(given.scores))
        return False


def _values_of(name, node, given):
    if name == "where":
        return given.self, given.other
    if name == "masked_fill":
        return given.self, given.value
    if name == "index_put":
        return given.self, given.values
    return given.self, getattr(given, "src", None), getattr(given, "value", None)
