"""From an ExportedProgram to the text of a module and what its caller must know."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from ..gpu.sizes import format_size
from ..graph.locations import describe
from ..graph.repeats import find_repeats, sizes_of
from .builder import Dim, Value
from .context import Context
from .registry import Unsupported


@dataclass(frozen=True)
class Argument:
    """One tensor argument of the function, in order.

    `kind` is "state" (a parameter, buffer or constant, by its dotted name) or
    "input" (a tensor that the caller passes).
    """

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[Dim | str, ...]


@dataclass(frozen=True)
class Result:
    """One result: sizes are arithmetic over the symbols, as text.

    `kind` is "output", or "state" and "input" for tensors that the model
    updates in place: it is the new content of the argument `name`, which code
    for a CPU stores there, and which is a result of its own on a GPU.
    """

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ImportedProgram:
    text: str
    function: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    # symbol -> (position among the arguments, dimension)
    symbols: dict[str, tuple[int, int]]
    # What eager would refuse of open sizes, as (size, relation, number).
    conditions: tuple[tuple[str | int, str, int], ...]
    # The flat outputs of the model: positions among the results, or constants.
    outputs: tuple[tuple[str, Any], ...]


def import_program(program: torch.export.ExportedProgram, function: str = "main",
                   label: Callable[[str], str] = str) -> ImportedProgram:
    """Writes a decomposed program as one public function over tensors.

    Parameters and buffers become arguments, in front of the inputs; `label`
    maps torch's names of arguments to the names that users know. Raises
    ImportFailed with every unsupported operation and its lines.
    """
    context = Context(function)
    arguments = _add_arguments(context, program, label)
    functions = _import_nodes(context, program.graph)
    context.check()
    results, outputs, values = _collect_results(context, program, label)
    for divisor in context.builder.divisors:
        context.require(divisor, "!=", 0)
    context.builder.location = "loc(unknown)"
    positions = {(a.kind, a.name): i for i, a in enumerate(arguments)}
    text = context.builder.finish(values, updates=[positions.get((r.kind, r.name))
                                                   for r in results])
    symbols = _symbols(arguments)
    arguments = tuple(Argument(a.kind, a.name, a.dtype, tuple(map(format_size, a.shape)))
                      for a in arguments)
    return ImportedProgram(context.locations.definitions() + "".join(functions) + text, function,
                           arguments, tuple(results), symbols,
                           tuple((format_size(size), relation, number)
                                 for size, relation, number in context.conditions),
                           tuple(outputs))


def _import_nodes(context, graph) -> list[str]:
    """Writes the graph into the context; returns the functions of repeated layers."""
    repeats = find_repeats(graph)
    functions: dict[int, tuple] = {}
    texts: list[str] = []
    done = set[torch.fx.Node]()
    for node in graph.nodes:
        group = repeats.get(node)
        if group is not None:
            if id(group) not in functions:
                functions[id(group)] = _import_function(context, group, f"layer{len(texts)}")
                texts.append(functions[id(group)][0])
            segment = next(s for s in group if s.nodes[0] is node)
            context.call(functions[id(group)][1], segment, *functions[id(group)][2:])
            done.update(segment.nodes)
        elif node.op == "call_function" and node not in done:
            context.run(node)
    return texts


def _import_function(context, group, name):
    """The function of equal layers: its text, name, sizes that it takes, results."""
    first = group[0]
    inner = Context(name, context.locations)
    for node in first.inputs:
        inner.argument(node, node.name)
    symbols = sizes_of(first)
    for symbol in symbols:
        inner.builder.size_argument(symbol)
    for node in first.nodes:
        inner.run(node)
    context.take_findings(inner, len(group))
    values = [inner.value(node) for node in first.outputs]
    shapes = [(inner.shape(node), inner.element(node)) for node in first.outputs]
    inner.builder.location = "loc(unknown)"
    return inner.builder.finish(values, private=True), name, symbols, shapes


def _add_arguments(context, program, label):
    arguments = []
    for node, spec in zip(_placeholders(program), program.graph_signature.input_specs):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue  # a number that tracing made a constant
        if spec.kind is InputKind.TOKEN:
            continue  # orders effects; what has effects is reported as unsupported
        state = spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        if not state and spec.kind is not InputKind.USER_INPUT:
            raise TypeError(f"expected parameters, buffers, constants and tensors as inputs of the "
                            f"program, found {spec.kind.name} '{node.name}'")
        name = label(spec.target if state else node.name)
        value = node.meta["val"]
        if value.dtype.is_complex:
            # Of functions inside of the program an argument may be: it is pairs there.
            raise TypeError(f"input '{name}': dtype {str(value.dtype).removeprefix('torch.')} is "
                            "not supported")
        try:
            context.argument(node, name)
        except Unsupported as problem:
            raise TypeError(f"input '{name}': {problem} is not supported") from None
        arguments.append(Argument("state" if state else "input", name, value.dtype,
                                  context.shape(value)))
    return arguments


def _placeholders(program):
    return [n for n in program.graph.nodes if n.op == "placeholder"]


def _symbols(arguments):
    """The symbols that the shapes of arguments bind, and where."""
    symbols: dict[str, tuple[int, int]] = {}
    for position, argument in enumerate(arguments):
        for dim, size in enumerate(argument.shape):
            if not isinstance(size, int) and size.is_Symbol:
                symbols.setdefault(str(size), (position, dim))
    return symbols


def _number(node, label) -> str:
    """A size, or what is computed of sizes and data, for a message."""
    if node.target is torch.ops.aten.sym_size.int:
        return f"the size of dim {node.args[1]} of '{label(node.args[0].name)}'"
    return f"a number computed at {describe(node)}"


_MUTATIONS = {OutputKind.BUFFER_MUTATION: "state", OutputKind.USER_INPUT_MUTATION: "input",
              OutputKind.PARAMETER_MUTATION: "state"}


def _collect_results(context, program, label):
    """Results of the function, the model's flat outputs in terms of them, their values."""
    results: list[Result] = []
    outputs: list[tuple[str, Any]] = []
    values: list[Value] = []
    node = next(n for n in program.graph.nodes if n.op == "output")
    for output, spec in zip(node.args[0], program.graph_signature.output_specs):
        tensor = output.meta.get("val") if isinstance(output, torch.fx.Node) else None
        if spec.kind is OutputKind.TOKEN:
            continue
        if tensor is None:
            outputs.append(("constant", output))
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected tensors and constants as outputs, found {_number(output, label)}; "
                            "return a tensor instead")
        if tensor.dtype.is_complex:
            raise TypeError(f"expected real tensors as outputs, found {str(tensor.dtype).removeprefix('torch.')} "
                            f"computed at {describe(output)}; return torch.view_as_real of it")
        if spec.kind is OutputKind.USER_OUTPUT:
            kind, name = "output", output.name
            outputs.append(("result", len(results)))
        elif spec.kind in _MUTATIONS:
            kind, name = _MUTATIONS[spec.kind], label(spec.target)
        else:
            raise TypeError(f"expected outputs and mutations, found {spec.kind.name}")
        values.append(context.value(output))
        results.append(Result(kind, name, tensor.dtype,
                              tuple(format_size(d) for d in context.shape(tensor))))
    return results, outputs, values
