"""moe_mlir.compile: a model as a function of compiled code."""

import torch
from torch.utils import _pytree as pytree

from .export import Module, export
from .sizes import evaluate_size


def compile(model_or_module, args=None, *, target="cpu", kwargs=None):
    """Compiles a model and returns a callable with the model's signature.

    Args:
        model_or_module: a torch.nn.Module, an ExportedProgram, or the Module
            that `moe_mlir.export` returned.
        args: example inputs, as a tuple; batch and token counts stay open.
        target: "cpu", this machine.
        kwargs: example keyword inputs.

    The callable reads the model's own weights at each call, and computes
    forward only: its results carry no gradients.
    """
    if target != "cpu":
        raise ValueError(f"expected target 'cpu', found '{target}'; kernels for GPUs come from "
                         "moe-compile, given the file that Module.save writes")
    module = model_or_module
    if not isinstance(module, Module):
        module = export(module, args, kwargs=kwargs)
    return CompiledModel(module)


class CompiledModel:
    """Compiled code, the weights that it reads, and the module that it came from."""

    def __init__(self, module: Module):
        from .runtime import compile_cached
        self.module = module
        self._executable = compile_cached(module.text)
        self._function = self._executable.function(module.function)
        program = module.program
        self._inputs = [i for i, a in enumerate(program.arguments) if a.kind == "input"]
        # Views of the weights without gradients; they share the weights' memory.
        self._operands = [module.state[a.name].detach() if a.kind == "state" else None
                          for a in program.arguments]
        self._positions = {(a.kind, a.name): i for i, a in enumerate(program.arguments)}
        for argument, tensor in zip(program.arguments, self._operands):
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"expected parameter '{argument.name}' to be contiguous, found "
                                 f"strides {tuple(tensor.stride())}; call .contiguous() on it")

    def __call__(self, *args, **kwargs):
        program = self.module.program
        operands = list(self._operands)
        for position, tensor in zip(self._inputs, self._tensors(args, kwargs)):
            operands[position] = _plain(tensor)
        symbols = self._sizes(operands)
        results = [torch.empty([evaluate_size(s, symbols) for s in r.shape], dtype=r.dtype)
                   for r in program.results]
        self._function(*operands, *results)
        self._copy_back(results, operands)
        flat = [results[value] if kind == "result" else value for kind, value in program.outputs]
        return pytree.tree_unflatten(flat, self.module.out_spec)

    def _tensors(self, args, kwargs) -> list:
        """The tensor inputs in order; the rest must be what export saw."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.module.in_spec:
            names = [self.module.program.arguments[i].name for i in self._inputs]
            raise TypeError(f"expected the inputs that the model was exported with, {names} in "
                            f"the same structure, found {len(args)} positional and keyword "
                            f"inputs {sorted(kwargs)}")
        tensors = []
        for i, leaf in enumerate(leaves):
            if i not in self.module.constants:
                tensors.append(leaf)
            elif leaf is not self.module.constants[i] and leaf != self.module.constants[i]:
                raise ValueError(f"expected {self.module.constants[i]!r}, the value at export, "
                                 f"found {leaf!r}; export again with it")
        return tensors

    def _sizes(self, operands) -> dict:
        """Checks the inputs and reads the symbols' values off them."""
        program = self.module.program
        symbols = {}
        for position in self._inputs:
            argument, tensor = program.arguments[position], operands[position]
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                raise TypeError(f"input '{argument.name}': expected a CPU tensor, found "
                                f"{getattr(tensor, 'device', type(tensor).__name__)}")
            if tensor.dtype != argument.dtype:
                raise TypeError(f"input '{argument.name}': expected {argument.dtype}, found "
                                f"{tensor.dtype}")
            if tensor.dim() != len(argument.shape):
                raise ValueError(f"input '{argument.name}': expected {len(argument.shape)} dims, "
                                 f"found shape {tuple(tensor.shape)}")
        for name, (position, dim) in program.symbols.items():
            symbols[name] = operands[position].shape[dim]
        for position in self._inputs:
            argument = program.arguments[position]
            expected = [evaluate_size(size, symbols) for size in argument.shape]
            if list(operands[position].shape) != expected:
                raise ValueError(f"input '{argument.name}': expected shape "
                                 f"{[str(s) for s in argument.shape]} = {expected}, found "
                                 f"{list(operands[position].shape)}")
        return symbols

    def _copy_back(self, results, operands) -> None:
        """Tensors that the model updates in place."""
        for result, spec in zip(results, self.module.program.results):
            if spec.kind != "output":
                operands[self._positions[spec.kind, spec.name]].copy_(result)


def _plain(leaf):
    """Contiguous memory without gradients; leaves that are no tensors fail later, by name."""
    return leaf.detach().contiguous() if isinstance(leaf, torch.Tensor) else leaf


__all__ = ["CompiledModel", "compile"]
