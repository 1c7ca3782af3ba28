"""moe_mlir.export: a torch model as an MLIR module."""

import os
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from .fx.raise_routing import raise_routing
from .importer import ImportedProgram, import_program

_PREFIX = "wrapped_model."


@dataclass
class Module:
    """A model as MLIR text, with the weights beside it.

    Attributes:
        text: the module's text; weights are arguments of its function.
        function: the name of the public function.
        state: parameters, buffers and constants by their dotted names. They
            are the model's own tensors: a later training step is seen.
        program: argument and result order, dtypes and sizes.
    """

    program: ImportedProgram
    state: dict
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    # Leaves of the inputs that were numbers, flags or None: fixed at export.
    constants: dict = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.program.text

    @property
    def function(self) -> str:
        return self.program.function

    def save(self, path) -> None:
        """Writes the module: `.mlir` as text, `.mlirbc` as bytecode; no weights."""
        suffix = os.path.splitext(os.fspath(path))[1]
        if suffix == ".mlir":
            data = self.text.encode()
        elif suffix == ".mlirbc":
            from ._native import native
            data = native().Module.parse(self.text).bytecode()
        else:
            raise ValueError(f"expected a path that ends in .mlir or .mlirbc, found '{path}'")
        with open(path, "wb") as file:
            file.write(data)

    def __str__(self) -> str:
        return self.text


class _Inputs(torch.nn.Module):
    """The model as a function of its tensor inputs alone.

    torch.export names dynamic dimensions after the forward's parameters, which
    decorated signatures hide; a flat list of tensors has one name for all.
    """

    def __init__(self, model, leaves, spec):
        super().__init__()
        self.wrapped_model = model
        self._leaves, self._spec = leaves, spec

    def forward(self, *tensors):
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self.wrapped_model(*args, **kwargs)


def _dynamic_dims(tensor: torch.Tensor):
    """All dims, except the last one of activations: that is a width."""
    dims = tensor.dim() if not tensor.is_floating_point() else max(tensor.dim() - 1, 0)
    return {i: torch.export.Dim.AUTO for i in range(dims)}


def trace(model, args, kwargs=None, dynamic_tokens=True):
    """The model's program in core ATen, its input spec and the inputs' leaves."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected 'model' to be a torch.nn.Module or an ExportedProgram, found "
                        f"{type(model).__name__}")
    if not isinstance(args, tuple):
        raise TypeError(f"expected 'args' to be a tuple of the model's inputs, found "
                        f"{type(args).__name__}; write (x,) for one input")
    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not tensors:
        raise ValueError("expected at least one tensor among the inputs of the model, found none")
    shapes = (tuple(_dynamic_dims(t) for t in tensors),) if dynamic_tokens else None
    # Sizes 0 and 1 are no special cases of the code that we write, so an
    # example with one token or one sequence still gives a dynamic dimension.
    with torch.fx.experimental._config.patch(backed_size_oblivious=True), torch.no_grad():
        program = torch.export.export(_Inputs(model, leaves, spec), tuple(tensors),
                                      dynamic_shapes=shapes)
        return program.run_decompositions(), spec, leaves


def export(model, args=None, *, dynamic_tokens=True, kwargs=None) -> Module:
    """Imports a model as MLIR: moe ops for its routers, linalg for the rest.

    Args:
        model: a torch.nn.Module, or an ExportedProgram (then without args).
        args: example inputs, as a tuple; their sizes are examples, too.
        dynamic_tokens: leave batch and token dimensions open.
        kwargs: example keyword inputs; those that are no tensors are fixed.

    Raises:
        ImportFailed: every unsupported operation, with its lines.
    """
    if isinstance(model, torch.export.ExportedProgram):
        program = model.run_decompositions()
        spec, leaves = program.call_spec.in_spec, None
    else:
        program, spec, leaves = trace(model, args, kwargs, dynamic_tokens)
    raise_routing(program.graph_module)
    imported = import_program(program)
    constants = {} if leaves is None else {
        i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
    state = {a.name: _state_tensor(program, a.name) for a in imported.arguments
             if a.kind == "state"}
    return Module(_without_prefix(imported), {_plain(n): t for n, t in state.items()}, spec,
                  program.call_spec.out_spec, constants)


def _state_tensor(program, name):
    if name in program.state_dict:
        return program.state_dict[name]
    return program.constants[name]


def _plain(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _without_prefix(imported: ImportedProgram) -> ImportedProgram:
    from dataclasses import replace
    return replace(
        imported,
        text=imported.text.replace(f'moe.name = "{_PREFIX}', 'moe.name = "'),
        arguments=tuple(replace(a, name=_plain(a.name)) for a in imported.arguments),
        results=tuple(replace(r, name=_plain(r.name)) for r in imported.results))
