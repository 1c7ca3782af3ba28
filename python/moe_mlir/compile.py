"""moe_mlir.compile: a model as a function of compiled code."""

import json
import operator

import torch
from torch.utils import _pytree as pytree

from ._native import native
from .export import Module, export
from .sizes import evaluate_size


def compile(model_or_module, args=None, *, target="cpu", kwargs=None):
    """Compiles a model and returns a callable with the model's signature.

    Args:
        model_or_module: a torch.nn.Module, an ExportedProgram, or the Module
            that `moe_mlir.export` returned.
        args: example inputs, as a tuple; batch and token counts stay open.
        target: "cpu", this machine, or a chip such as "sm_90": then inputs and
            weights are CUDA tensors, or CPU tensors inside `moe_mlir.simulate`.
        kwargs: example keyword inputs.

    The callable reads the model's own weights at each call, and computes
    forward only: its results carry no gradients.
    """
    targets = ["cpu", *native().known_chips()]
    if target not in targets:
        raise ValueError(f"expected 'target' to be one of {', '.join(targets)}, found {target!r}")
    module = model_or_module
    if not isinstance(module, Module):
        module = export(module, args, kwargs=kwargs)
    return CompiledModel(module, target)


def _compile_function(module: Module, target: str):
    """The module's function of inputs and result buffers."""
    from .runtime import compile_cached, compile_kernels_cached

    if target == "cpu":
        return compile_cached(module.text).function(module.function)
    from .artifact import KernelFunction
    from .launch import LaunchPlan

    code = json.loads(compile_kernels_cached(module.text, target))
    plans = {f["name"]: LaunchPlan(f) for f in code["functions"]}
    return KernelFunction(code["ptx"], plans[module.function], target)


_RELATIONS = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
              ">": operator.gt, ">=": operator.ge}


class CompiledModel:
    """Compiled code, the weights that it reads, and the module that it came from."""

    def __init__(self, module: Module, target: str = "cpu"):
        self.module, self.target = module, target
        self._function = _compile_function(module, target)
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
        device = self._device(operands)
        results = [torch.empty([evaluate_size(s, symbols) for s in r.shape], dtype=r.dtype,
                               device=device) for r in program.results]
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
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"input '{argument.name}': expected a tensor, found "
                                f"{type(tensor).__name__}")
            if tensor.dtype != argument.dtype:
                raise TypeError(f"input '{argument.name}': expected {argument.dtype}, found "
                                f"{tensor.dtype}")
            if tensor.dim() != len(argument.shape):
                raise ValueError(f"input '{argument.name}': expected {len(argument.shape)} dims, "
                                 f"found shape {tuple(tensor.shape)}")
        for name, (position, dim) in program.symbols.items():
            symbols[name] = operands[position].shape[dim]
        self._check_conditions(symbols)
        for position in self._inputs:
            argument = program.arguments[position]
            expected = [evaluate_size(size, symbols) for size in argument.shape]
            if list(operands[position].shape) != expected:
                raise ValueError(f"input '{argument.name}': expected shape "
                                 f"{[str(s) for s in argument.shape]} = {expected}, found "
                                 f"{list(operands[position].shape)}")
        return symbols

    def _check_conditions(self, symbols):
        """The model's code may have asked `x.shape[1] == 1` and gone one way."""
        program = self.module.program
        for name, relation, number in self.module.conditions:
            if name in symbols and not _RELATIONS[relation](symbols[name], number):
                position, dim = program.symbols[name]
                raise ValueError(
                    f"input '{program.arguments[position].name}': expected dim {dim} {relation} "
                    f"{number}, as the model's own code asked when it was traced, found "
                    f"{symbols[name]}; compile the model with an example of that size, too")

    def _device(self, operands):
        """The device of all operands: the CPU, or a GPU if the code is for one."""
        allowed = ("cpu",) if self.target == "cpu" else ("cpu", "cuda")
        device = operands[0].device if operands else torch.device("cpu")
        for argument, tensor in zip(self.module.program.arguments, operands):
            if tensor.device.type not in allowed or tensor.device != device:
                kind = "input" if argument.kind == "input" else "weight"
                expected = "a CPU tensor" if self.target == "cpu" else f"a tensor on {device}"
                raise TypeError(f"{kind} '{argument.name}': expected {expected}, found "
                                f"{tensor.device}")
        return device

    def _copy_back(self, results, operands) -> None:
        """Tensors that the model updates in place."""
        for result, spec in zip(results, self.module.program.results):
            if spec.kind != "output":
                operands[self._positions[spec.kind, spec.name]].copy_(result)


def _plain(leaf):
    """Contiguous memory without gradients; leaves that are no tensors fail later, by name."""
    return leaf.detach().contiguous() if isinstance(leaf, torch.Tensor) else leaf


__all__ = ["CompiledModel", "compile"]
