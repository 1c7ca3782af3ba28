"""Layers that a model repeats, folded into one node each while torch decomposes the rest.

Of equal layers (`graph.repeats`) one is decomposed; the others are nodes
`moe::folded_layer` for as long, and afterwards copies of it on their own inputs.
"""

import copy
import operator

import torch
from torch.fx import Graph

from .._torch.core import OpOverload
from ..graph.repeats import find_repeats, layer_path
from .defer_writes import defer_writes
from .memory import origin, written
from .reading import is_assertion

_LIBRARY = torch.library.Library("moe", "FRAGMENT")


def _define(schema, fake):
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    torch.library.register_fake(f"moe::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.moe, name).default


# Around the layer that is decomposed, so that its nodes are found again.
_BEGIN = _define("layer_begin(Tensor[] inputs, str path) -> Tensor[]",
                 lambda inputs, path: list(map(torch.empty_like, inputs)))
_END = _define("layer_end(Tensor[] outputs) -> Tensor[]",
               lambda outputs: list(map(torch.empty_like, outputs)))
# Repeats the layer of the layer_begin with number `begin`; output i has the
# type of input like[i].
_FOLDED = _define(
    "folded_layer(Tensor[] inputs, int begin, int[] like, str path) -> Tensor[]",
    lambda inputs, begin, like, path: [torch.empty_like(inputs[i]) for i in like])


def fold_layers(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with folded layers; itself where no layers are equal."""
    graph = copy.deepcopy(program.graph)
    _erase_assertions(graph)
    defer_writes(graph)
    groups = [group for group in _groups(graph) if _can_fold(group)]
    if not groups:
        return program
    for segment, index in _last_first(groups):
        if segment is groups[index][0]:
            _bracket(graph, segment)
        else:
            _fold(graph, segment, index, _like(segment))
    graph.eliminate_dead_code()
    return torch.export.ExportedProgram(
        program.graph_module, graph, copy.deepcopy(program.graph_signature), program.state_dict,
        program.range_constraints, copy.deepcopy(program.module_call_graph),
        constants=program.constants, verifiers=program.verifiers)


def unfold_layers(graph: Graph) -> None:
    """Writes the layers out again that `fold_layers` folded."""
    begins = [node for node in graph.nodes if node.target is _BEGIN]
    ends = [node for node in graph.nodes if node.target is _END]
    bodies = [_between(begin, end) for begin, end in zip(begins, ends, strict=True)]
    for node in list(graph.nodes):
        if node.target is _FOLDED:
            index = node.args[1]
            _bypass(node, _copy(graph, begins[index], bodies[index], ends[index], node))
    for marker in (*begins, *ends):
        _bypass(marker, marker.args[0])


# --------------------------------------------------------------------- folding


def _groups(graph):
    """Groups of equal layers, in the order of their first layers."""
    # A layer that is decomposed once less is a gain already: it becomes no call.
    repeats, groups = find_repeats(graph, fewest=2), []
    for node in graph.nodes:
        if node in repeats and repeats[node] not in groups:
            groups.append(repeats[node])
    return groups


def _can_fold(group) -> bool:
    return (None not in _like(group[0])
            and all(_is_closed(segment) and _leaves_inputs_alone(segment) for segment in group))


def _like(segment) -> list:
    """For every output the place of an input with its type, or None."""
    types = [_layout(node) for node in segment.inputs]
    return [types.index(_layout(node)) if _layout(node) in types else None
            for node in segment.outputs]


def _layout(node):
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return None
    return val.dtype, val.device, list(map(str, val.shape)), list(map(str, val.stride()))


def _is_closed(segment) -> bool:
    """Whether the layer is one piece: tensors go in before it, and come out into other calls."""
    inside = set(segment.nodes)
    return (all(node < segment.nodes[0] for node in segment.inputs)
            and all(_is_plain_call(node) for node in segment.nodes)
            and all(user in inside or _is_plain_call(user)
                    for node in segment.nodes for user in node.users))


def _is_plain_call(node) -> bool:
    """A call without subgraphs, of tensors."""
    plain = isinstance(node.target, OpOverload) or node.target is operator.getitem
    return plain and node.op == "call_function" and not _is_size(node)


def _leaves_inputs_alone(segment) -> bool:
    """Whether all that the layer writes in place, it has made itself."""
    inside = set(segment.nodes)
    return all(origin(x, inside.__contains__) in inside
               for node in segment.nodes for x in written(node))


def _last_first(groups):
    """Every layer with the number of its group, so that inputs are still what the layer names."""
    layers = [(segment, index) for index, group in enumerate(groups) for segment in group]
    return sorted(layers, key=lambda layer: layer[0].nodes[0], reverse=True)


def _fold(graph, segment, index, like):
    inside = set(segment.nodes)
    with graph.inserting_after(segment.nodes[-1]):
        call = _call(graph, _FOLDED, segment, segment.outputs,
                     (segment.inputs, index, like, layer_path(segment.nodes[0])))
    _use_instead(graph, segment.outputs, call, lambda user: user not in inside)
    for node in reversed(segment.nodes):
        graph.erase_node(node)


def _bracket(graph, segment):
    inside = set(segment.nodes)
    with graph.inserting_before(segment.nodes[0]):
        begin = _call(graph, _BEGIN, segment, segment.inputs,
                      (segment.inputs, layer_path(segment.nodes[0])))
    _use_instead(graph, segment.inputs, begin, inside.__contains__)
    with graph.inserting_after(segment.nodes[-1]):
        end = _call(graph, _END, segment, segment.outputs, (segment.outputs,))
    _use_instead(graph, segment.outputs, end, lambda user: user not in inside)


def _call(graph, target, segment, values, args):
    call = graph.call_function(target, args)
    call.meta = {key: value for key, value in segment.nodes[-1].meta.items()
                 if key in ("nn_module_stack", "stack_trace")}
    call.meta["val"] = [node.meta["val"] for node in values]
    return call


def _use_instead(graph, nodes, call, is_user):
    """Users of the nodes use the call's results; the call itself is none."""
    place = call
    for i, node in enumerate(nodes):
        with graph.inserting_after(place):
            place = graph.call_function(operator.getitem, (call, i))
        place.meta = {**call.meta, "val": call.meta["val"][i]}
        node.replace_all_uses_with(
            place, propagate_meta=False,
            delete_user_cb=lambda user: user is not call and is_user(user))


def _erase_assertions(graph):
    """They are other users of a layer's tensors, and say what the program's types say."""
    for node in list(graph.nodes):
        if is_assertion(node):
            graph.erase_node(node)


# ------------------------------------------------------------------- unfolding


def _between(begin, end):
    body, node = [], begin.next
    while node is not end:
        body.append(node)
        node = node.next
    return body


def _copy(graph, begin, body, end, call):
    """Writes the layer once more in front of `call`, on its inputs; returns its outputs."""
    value = {}
    paths = begin.args[1], call.args[3]
    with graph.inserting_before(call):
        for node in body:
            if node.target is operator.getitem and node.args[0] is begin:
                value[node] = call.args[0][node.args[1]]
            elif not _is_size(node):
                value[node] = graph.node_copy(node, lambda n: value.get(n, n))
                value[node].meta = _moved(node.meta, *paths)
    return [value.get(node, node) for node in end.args[0]]


def _is_size(node) -> bool:
    """Sizes are those of the program, whichever layer asks first."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _moved(meta, source, target):
    """The metadata with one layer's module path in place of another's."""
    stack = {key: (path.replace(source, target, 1) if _is_in(path, source) else path, kind)
             for key, (path, kind) in (meta.get("nn_module_stack") or {}).items()}
    return {**meta, "nn_module_stack": stack}


def _is_in(path, layer) -> bool:
    return f"{layer}." in f"{path}."


def _bypass(call, values):
    """Users of the call's results use the values; the call goes."""
    for item in list(call.users):
        item.replace_all_uses_with(values[item.args[1]], propagate_meta=False)
        call.graph.erase_node(item)
    call.graph.erase_node(call)
