"""torch's decompositions, carried out call by call on a graph that has been traced.

`ExportedProgram.run_decompositions` runs the whole program twice more, by tensors that record what
is asked of each of their sizes: that takes longer than the first trace. But a program of torch.export
is a graph already, and most of its calls stay as they are. Here only those that do not are run, each
of its kind once, and what they consist of is written in their place.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node

from .._torch.core import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    is_composite,
    pytree,
)
from .._torch.decompositions import enable_python_dispatcher
from .functional import make_functional
from .grad_modes import inline_grad_modes
from .reading import is_assertion

aten = torch.ops.aten


class NeedsTrace(Exception):
    """What the program has that only a trace of the whole decomposes."""


def decompose_calls(program: torch.export.ExportedProgram, table: Mapping[OpOverload, Callable],
                    kept: frozenset[OpOverload]) -> torch.export.ExportedProgram:
    """What `program.run_decompositions` gives.

    Args:
        program: as torch.export gives it.
        table: functions that give the results of an operator by others.
        kept: operators that stay, though torch has them as functions of others.

    Raises:
        NeedsTrace: the program has subgraphs or sizes that depend on data, or writes what views show.
    """
    # A second trace finds some of these to be known.
    if any(node.meta.get("unbacked_bindings") for node in program.graph.nodes):
        raise NeedsTrace("sizes that depend on data")
    graph = copy.deepcopy(program.graph)
    inline_grad_modes(graph, program.graph_module)
    if any(node.op == "get_attr" for node in graph.nodes) or any(
            spec.kind is not OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        raise NeedsTrace("subgraphs, or updates that are results")
    for node in [node for node in graph.nodes if is_assertion(node)]:
        graph.erase_node(node)
    updates = make_functional(graph)
    if updates is None:
        raise NeedsTrace("writes in place that views show")
    writer = _Writer(graph, _Decompositions(graph, table, kept))
    new, signature = writer.write(), copy.deepcopy(program.graph_signature)
    _name_inputs(new, signature)
    _name_results(new, signature)
    _add_updates(new, signature, {writer.value[x]: writer.value[y] for x, y in updates.items()})
    new.eliminate_dead_code()
    return torch.export.ExportedProgram(
        program.graph_module, new, signature, program.state_dict, program.range_constraints,
        copy.deepcopy(program.module_call_graph), constants=program.constants,
        verifiers=program.verifiers)


# ---- the calls of a program -----------------------------------------------------------


class _Writer:
    """Writes a graph anew, call by call.

    Attributes:
        value: node of the old graph -> node of the new one, or a list where a call has several
            results that are nodes of their own.
    """

    def __init__(self, graph: Graph, decompositions: _Decompositions):
        self._old, self._new, self._decompositions = graph, Graph(), decompositions
        self.value: dict[Node, Any] = {}
        self._sizes: dict[sympy.Expr, Node] = {}

    def write(self) -> Graph:
        for node in self._old.nodes:
            self.value[node] = self._write(node)
        return self._new

    def _write(self, node) -> Any:
        if node.target is operator.getitem and isinstance(self.value[node.args[0]], (list, tuple)):
            return self.value[node.args[0]][node.args[1]]
        body = self._decompositions.body(node) if node.op == "call_function" else None
        if body is None:
            return self._copy(node)
        return self._inline(node, body)

    def _copy(self, node) -> Node:
        new = self._new.node_copy(node, self._value_of)
        new.meta = dict(node.meta)
        if new.target is aten.lift_fresh_copy.default:
            new.target = aten.clone.default
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            self._sizes.setdefault(val.node.expr, new)
        return new

    def _value_of(self, node) -> Node:
        new = self.value[node]
        if not isinstance(new, Node):
            raise NeedsTrace(f"a call that takes all results of {node.target}")
        return new

    def _inline(self, node, body) -> Any:
        values = list(map(self._value_of, _tensors_of(node)))

        def resolve(argument):
            if isinstance(argument, _Number):
                return values[argument.number]
            return self._size(argument.node.expr) if isinstance(argument, torch.SymInt) else argument
        written_as = {} if is_composite(node.target) else {"original_aten": node.target}
        for step in body.steps:
            args, kwargs = torch.fx.node.map_aggregate((step.args, step.kwargs), resolve)
            new = self._new.call_function(step.target, args, kwargs)
            # The line of the model and its operator, for errors and for layers that are equal.
            new.meta = {**node.meta, **written_as, "val": step.value}
            values.append(new)
        return torch.fx.node.map_aggregate(body.results, resolve)

    def _size(self, expr) -> Node | int:
        """A size as what the graph computes it by."""
        if expr.is_Integer:
            return int(expr)
        if expr not in self._sizes:
            node = self._size_of_input(expr) if expr.is_Symbol else self._computed_size(expr)
            if node.meta["val"].node.expr != expr:
                raise NeedsTrace(f"the size {expr}")
            self._sizes[expr] = node
        return self._sizes[expr]

    def _size_of_input(self, symbol) -> Node:
        for node in self._new.nodes:
            shape = getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ()
            for dim, size in enumerate(shape):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    return self._call_of_sizes(aten.sym_size.int, node, dim, size)
        raise NeedsTrace(f"the size {symbol}, which no input has")

    def _computed_size(self, expr) -> Node:
        function = _ARITHMETIC.get(type(expr).__name__)
        if function is None:
            raise NeedsTrace(f"the size {expr}")
        result, *others = map(self._size, expr.args)
        for other in others:
            result = self._call_of_sizes(
                function, result, other, function(*(_number(x) for x in (result, other))))
        return result

    def _call_of_sizes(self, function, *args) -> Node:
        node = self._new.call_function(function, args[:-1])
        node.meta["val"] = args[-1]
        return node


_ARITHMETIC = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv,
               "CleanDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod}


def _number(size: Node | int):
    return size.meta["val"] if isinstance(size, Node) else size


def _tensors_of(node) -> list[Node]:
    """The arguments that are tensors, each once."""
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]


def _name_inputs(graph, signature) -> None:
    """A copy of a graph gives another name to an input that has that of a builtin, as `input`."""
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    for node, spec in zip(nodes, signature.input_specs, strict=True):
        node.name = spec.arg.name


def _name_results(graph, signature) -> None:
    """What gives its argument back is gone, and the argument is the result."""
    output = next(node for node in graph.nodes if node.op == "output")
    for value, spec in zip(output.args[0], signature.output_specs, strict=True):
        if isinstance(value, Node):
            spec.arg.name = value.name


def _add_updates(graph, signature, updates) -> None:
    """The new values of inputs, in front of the results."""
    if not updates:
        return
    output = next(node for node in graph.nodes if node.op == "output")
    specs = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
    values, outputs = [], []
    for node in [node for node in graph.nodes if node in updates]:
        spec, value = specs[node.name], updates[node]
        if spec.kind not in (InputKind.BUFFER, InputKind.USER_INPUT):
            raise NeedsTrace(f"an update of a {spec.kind}")
        is_buffer = spec.kind is InputKind.BUFFER
        kind = OutputKind.BUFFER_MUTATION if is_buffer else OutputKind.USER_INPUT_MUTATION
        values.append(value)
        outputs.append(OutputSpec(kind, TensorArgument(value.name), spec.target if is_buffer else node.name))
    output.args = ((*values, *output.args[0]),)
    signature.output_specs = [*outputs, *signature.output_specs]


# ---- what a call consists of ----------------------------------------------------------


@dataclass(frozen=True)
class _Number:
    """In the place of a tensor: the inputs of a body are counted, and then its steps."""

    number: int


class _Step(NamedTuple):
    target: Callable
    args: tuple
    kwargs: dict
    value: Any


class _Body(NamedTuple):
    """What one call consists of."""

    steps: list[_Step]
    results: Any


class _Decompositions:
    """The bodies of the calls of a graph, each kind of call run once."""

    def __init__(self, graph: Graph, table: Mapping[OpOverload, Callable],
                 kept: frozenset[OpOverload]):
        self._table, self._kept = table, kept
        self._known: dict[Any, _Body | None] = {}
        leaves = (x for node in graph.nodes for x in pytree.tree_leaves(node.meta.get("val")))
        self._mode: FakeTensorMode | None = next(
            (x.fake_mode for x in leaves if isinstance(x, FakeTensor)), None)

    def body(self, node: Node) -> _Body | None:
        """What the call consists of; None where it stays as it is."""
        target = node.target
        if not isinstance(target, OpOverload):
            if target is not operator.getitem and _has_tensors(node):
                raise NeedsTrace(f"a call of {target}")
            return None
        if target in self._kept or not (target in self._table or is_composite(target)) \
                or not _has_tensors(node):
            return None
        key = _kind_of(node)
        if key not in self._known:
            self._known[key] = self._run(node)
        return self._known[key]

    def _run(self, node) -> _Body | None:
        recorder = _Recorder(self._table, self._kept, [x.meta["val"] for x in _tensors_of(node)])
        args, kwargs = pytree.tree_map_only(Node, lambda x: x.meta["val"],
                                            (list(node.args), dict(node.kwargs)))
        args = [list(x) if isinstance(x, list) else x for x in args]  # torch's functions may write them
        if self._mode is None:
            raise NeedsTrace("tensors with memory")
        with torch.no_grad(), self._mode, enable_python_dispatcher(), recorder:
            results = self._table.get(node.target, node.target)(*args, **kwargs)
        if results is NotImplemented:
            return None
        return _Body(recorder.steps, recorder.numbers_of(results))


def _has_tensors(node) -> bool:
    return any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(node.meta.get("val")))


def _kind_of(node) -> Any:
    """Equal for calls that consist of the same."""
    tensors = {x: i for i, x in enumerate(_tensors_of(node))}

    def describe(x):
        val = x.meta["val"]
        if not isinstance(val, torch.Tensor):
            return str(val)
        return (tensors[x], val.dtype, str(val.device), str(tuple(val.shape)), str(val.stride()),
                str(val.storage_offset()), val.layout)
    return repr((node.target, torch.fx.node.map_arg((node.args, node.kwargs), describe)))


# What a product in the body of another call would be, had it been kept.
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default,
             aten.mv.default, aten.dot.default, aten.addmv.default}
# What gives nothing, and stays.
_CHECKS = {aten._assert_async.default, aten._assert_async.msg}
# What is asked of a tensor beside its numbers: no call of the body.
_QUESTIONS = {torch.ops.prim.device.default, aten.size.default, aten.sym_size.default, aten.sym_stride.default,
              aten.sym_numel.default, aten.sym_storage_offset.default}


class _Recorder(TorchDispatchMode):
    """Records the calls of operators that have no decomposition."""

    def __init__(self, table: Mapping[OpOverload, Callable], kept: frozenset[OpOverload],
                 inputs: list[torch.Tensor]):
        super().__init__()
        self.steps: list[_Step] = []
        self._table, self._kept = table, kept
        self._inputs = len(inputs)
        # Of a tensor its number, and the tensor, so that no other gets its id.
        self._numbers = {id(tensor): (_Number(i), tensor) for i, tensor in enumerate(inputs)}

    def numbers_of(self, values: Any) -> Any:
        """The values with numbers in the place of tensors."""
        return torch.fx.node.map_aggregate(values, self._number_of)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            return func(*args, **kwargs)
        decomposition = self._table.get(func)
        if decomposition is None and is_composite(func) and func not in self._kept:
            decomposition = func.decompose
        if decomposition is not None:
            with self:
                results = decomposition(*args, **kwargs)
            if results is not NotImplemented:
                return results
        if func._schema.is_mutable or func in _PRODUCTS:
            raise NeedsTrace(f"{func} in the body of another call")
        results = func(*args, **kwargs)
        if func is aten.alias.default:
            self._numbers[id(results)] = (self._number_of(args[0]), results)
        else:
            self._record(func, self.numbers_of(args), self.numbers_of(kwargs), results)
        return results

    def _record(self, target, args, kwargs, value) -> None:
        number = _Number(self._inputs + len(self.steps))
        self.steps.append(_Step(target, args, kwargs, value))
        if isinstance(value, FakeTensor):
            self._numbers[id(value)] = (number, value)
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                self._record(operator.getitem, (number, i), {}, item)
        elif target not in _CHECKS:
            raise NeedsTrace(f"{target}, which gives a {type(value).__name__}, in the body of a call")

    def _number_of(self, value):
        if isinstance(value, torch.Tensor):
            if id(value) not in self._numbers:
                raise NeedsTrace("a constant in the body of a call")
            return self._numbers[id(value)][0]
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise NeedsTrace(f"a {type(value).__name__} in the body of a call")
        return value
