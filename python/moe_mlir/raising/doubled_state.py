"""Buffers that a program has a second time, as constants.

A model may hold the tensors of its buffers in objects that are no modules, as a
cache does. Where it reads them there, torch.export makes constants of them, and
cannot decompose a program that writes both.
"""

import copy

import torch
from torch.export.graph_signature import InputKind


def merge_doubled_state(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with one input for each buffer; itself where there is no other."""
    doubles = _find_doubles(program)
    if not doubles:
        return program
    graph, signature = copy.deepcopy(program.graph), copy.deepcopy(program.graph_signature)
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for constant, buffer in doubles.items():
        nodes[constant].replace_all_uses_with(nodes[buffer], propagate_meta=False)
        graph.erase_node(nodes[constant])
    signature.input_specs = [spec for spec in signature.input_specs
                             if getattr(spec.arg, "name", None) not in doubles]
    return torch.export.ExportedProgram(
        program.graph_module, graph, signature, program.state_dict, program.range_constraints,
        copy.deepcopy(program.module_call_graph), constants=program.constants,
        verifiers=program.verifiers)


def _find_doubles(program) -> dict[str, str]:
    """Names of constants -> names of the buffers whose memory they show."""
    tensors = {**program.constants, **program.state_dict}
    specs = program.graph_signature.input_specs
    buffers = {_memory(tensors[spec.target]): spec.arg.name for spec in specs
               if spec.kind is InputKind.BUFFER}
    found = {}
    for spec in specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            buffer = buffers.get(_memory(tensors[spec.target]))
            if buffer is not None:
                found[spec.arg.name] = buffer
    return found


def _memory(tensor) -> tuple:
    """Equal for tensors that show the same elements of the same memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype,
            tuple(tensor.shape), tensor.stride())
