"""One traced program as compiled code: which calls it serves, and how it runs them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._torch.core import (
    FakeTensor,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
    pytree,
)
from ..frontends.export import Module
from ..gpu.sizes import describe_condition, evaluate_text, unmet_condition
from ..guards.model_form import same_constant
from ..guards.updated_memory import aliasing_pair


class _TENSOR:
    """In the place of a tensor among the inputs; as a class, the same in copies and processes."""


class CallMismatch(Exception):
    """A call that this program does not serve.

    `error` is what the caller reads if no other program does; `can_retrace`
    says whether a trace of this very call may, `is_size` whether that is for
    its sizes alone.
    """

    def __init__(self, error: Exception, *, can_retrace: bool = False, is_size: bool = False):
        super().__init__(str(error))
        self.error, self.can_retrace, self.is_size = error, can_retrace, is_size


class Call(NamedTuple):
    """What code is run with: its operands, and (sizes, dtype) of each result."""

    operands: list[torch.Tensor]
    results: list[tuple[list[int], torch.dtype]]


class CompiledProgram:
    """Compiled code, the weights that it reads, and the module that it came from."""

    def __init__(self, module: Module, target: str, name_inputs: Callable[..., Mapping[str, Any]],
                 kernel_configs: Mapping[str, str] | None = None):
        self.module, self.target = module, target
        self._kernel_configs = kernel_configs
        leaves = range(module.in_spec.num_leaves)
        args, kwargs = pytree.tree_unflatten(
            [module.constants.get(i, _TENSOR) for i in leaves], module.in_spec)
        # (name, structure, leaves with _TENSOR for tensors), in the order of the leaves.
        named = name_inputs(args, kwargs)
        self._forms = [(name, *reversed(pytree.tree_flatten(value)))
                       for name, value in named.items()]
        # Inputs without tensors: what the example says holds for every call.
        self.fixed = {name: named[name] for name, _, leaves in self._forms
                      if not any(leaf is _TENSOR for leaf in leaves)}
        arguments = module.program.arguments
        self.inputs = [i for i, a in enumerate(arguments) if a.kind == "input"]
        self.weights = [(i, a.name) for i, a in enumerate(arguments) if a.kind == "state"]
        self._positions = {(a.kind, a.name): i for i, a in enumerate(arguments)}
        # result -> the argument that it updates
        self.updated = {i: self._positions[r.kind, r.name]
                        for i, r in enumerate(module.program.results) if r.kind != "output"}
        # Where the operands of the last call lay, which were found apart.
        self._checked_layout: list | None = None
        self.function = _compile_function(module, target, kernel_configs)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "function"} | {
            "_checked_layout": None}

    def __setstate__(self, state):
        vars(self).update(state)
        self.function = _compile_function(self.module, self.target, self._kernel_configs)

    # ---- which calls -------------------------------------------------------

    def fit(self, values: dict) -> Call:
        """What a call with these named inputs runs with; raises CallMismatch."""
        tensors = self._tensors(values)
        operands = [None] * len(self.module.program.arguments)
        self._read_weights(operands)
        for position, tensor in zip(self.inputs, tensors, strict=True):
            operands[position] = tensor
        self._check_kinds(operands)
        symbols = self._symbols(operands)
        return Call(operands, [([evaluate_text(size, symbols) for size in r.shape], r.dtype)
                               for r in self.module.program.results])

    def _tensors(self, values) -> list:
        """The tensor inputs in order; the rest must be what export saw."""
        if values.keys() != {name for name, *_ in self._forms}:
            raise self._another_form(values)
        tensors = []
        for name, spec, expected in self._forms:
            leaves, found = pytree.tree_flatten(values[name])
            if found != spec:
                raise self._another_form(values)
            for old, new in zip(expected, leaves):
                if old is _TENSOR:
                    tensors.append(new)
                elif not same_constant(old, new):
                    raise CallMismatch(another_constant(name, old, new), can_retrace=True)
        return tensors

    def _another_form(self, values) -> CallMismatch:
        expected = [name for name, *_ in self._forms]
        return CallMismatch(TypeError(
            f"expected the inputs that the model was exported with, {expected} in the same "
            f"structure, found {list(values)}"), can_retrace=True)

    def _read_weights(self, operands) -> None:
        module = self.module
        change = module.state.change()
        if change:
            raise CallMismatch(ValueError(f"expected the model as it was exported, found {change}; export "
                                    "it again"), can_retrace=True)
        for position, _ in self.weights:
            argument = module.program.arguments[position]
            try:
                tensor = operands[position] = module.state[argument.name]
            except ValueError as error:  # None is in its place
                raise CallMismatch(error, can_retrace=True) from None
            if tensor.dtype != argument.dtype or tuple(tensor.shape) != argument.shape:
                raise CallMismatch(TypeError(
                    f"weight '{argument.name}': expected {argument.dtype} {list(argument.shape)}, "
                    f"as at export, found {tensor.dtype} {list(tensor.shape)}; export the model "
                    "again"), can_retrace=True)
            if not tensor.is_contiguous():
                raise CallMismatch(ValueError(
                    f"expected parameter '{argument.name}' to be contiguous, found strides "
                    f"{tuple(tensor.stride())}; call .contiguous() on it"))

    def _check_kinds(self, operands) -> None:
        """What no other size could mend: types, dims, widths, devices."""
        for position in self.inputs:
            argument, tensor = self.module.program.arguments[position], operands[position]
            if not isinstance(tensor, torch.Tensor):
                problem: Exception = TypeError(f"expected a tensor, found {type(tensor).__name__}")
            elif tensor.dtype != argument.dtype:
                problem = TypeError(f"expected {argument.dtype}, found {tensor.dtype}")
            elif tensor.dim() != len(argument.shape):
                problem = ValueError(f"expected {len(argument.shape)} dims, found shape "
                                     f"{tuple(tensor.shape)}")
            elif tensor.layout is not torch.strided:
                problem = TypeError(f"expected a dense tensor, found {tensor.layout}")
            else:
                continue
            raise CallMismatch(type(problem)(f"input '{argument.name}': {problem}"))
        self._check_devices(operands)

    def _check_devices(self, operands) -> None:
        """All on the CPU, or on one GPU if the code is for one."""
        allowed = ("cpu",) if self.target == "cpu" else ("cpu", "cuda")
        device = operands[0].device if operands else torch.device("cpu")
        for argument, tensor in zip(self.module.program.arguments, operands):
            if tensor.device.type not in allowed or tensor.device != device:
                kind = "input" if argument.kind == "input" else "weight"
                expected = "a CPU tensor" if self.target == "cpu" else f"a tensor on {device}"
                raise CallMismatch(TypeError(f"{kind} '{argument.name}': expected {expected}, found "
                                       f"{tensor.device}"))
            if not has_plain_memory(tensor):
                raise CallMismatch(TypeError(
                    f"'{argument.name}': expected a tensor with memory of its own, found a "
                    f"{type(tensor).__name__} of a transform, or fake; compiled models run outside "
                    "of torch.func, torch.compile and sharding"))

    def _symbols(self, operands) -> dict:
        """Reads the symbols' values off the inputs, and checks all sizes."""
        program = self.module.program
        symbols = {name: operands[position].shape[dim]
                   for name, (position, dim) in program.symbols.items()}
        self._check_conditions(symbols)
        for position in self.inputs:
            argument, found = program.arguments[position], list(operands[position].shape)
            expected = [evaluate_text(size, symbols) for size in argument.shape]
            if found != expected:
                # The last dim of activations is a width.
                is_width = operands[position].is_floating_point() and found[-1:] != expected[-1:]
                raise CallMismatch(ValueError(
                    f"input '{argument.name}': expected shape {[str(s) for s in argument.shape]} = "
                    f"{expected}, found {found}"), can_retrace=not is_width, is_size=True)
        return symbols

    def _check_conditions(self, symbols) -> None:
        """The model's code may have asked `x.shape[1] == 1` and gone one way."""
        program = self.module.program
        unmet = unmet_condition(self.module.conditions, symbols)
        if unmet is None:
            return
        places = {name: (program.arguments[position].name, dim)
                  for name, (position, dim) in program.symbols.items()}
        why, what_to_do = (
            ("the program was exported", "export it with sizes that include this one")
            if self.module.model is None else
            ("the model's own code asked when it was traced",
             "compile the model with an example of that size, too"))
        raise CallMismatch(ValueError(f"{describe_condition(unmet, symbols, places, why)}; "
                                f"{what_to_do}"), can_retrace=True, is_size=True)

    # ---- the run -----------------------------------------------------------

    @torch.no_grad()
    def run(self, call: Call, caches: Sequence[object] = ()) -> Any:
        """The model's outputs for what `fit` gave; updates what the model updates.

        `caches` are those among the inputs, of which the model may return some.
        """
        operands = call.operands
        if self.updated:
            self._require_no_alias(operands)
        plain = [_plain(tensor) for tensor in operands]
        device = operands[0].device if operands else torch.device("cpu")
        # Code for a CPU stores updates in their arguments, which are no results then.
        results = [plain[self.updated[i]] if i in self.updated and self.target == "cpu" else
                   torch.empty(sizes, dtype=dtype, device=device)
                   for i, (sizes, dtype) in enumerate(call.results)]
        self.function(*plain, *(r for i, r in enumerate(results)
                                if i not in self.updated or self.target != "cpu"))
        for result, position in self.updated.items():
            if results[result].data_ptr() != operands[position].data_ptr():
                operands[position].copy_(results[result])
        return self.outputs_of(results, caches)

    @property
    def returns_updated(self) -> bool:
        """Whether outputs are results that update an argument, other than a cache that was given."""
        return any(kind == "result" and value in self.updated
                   for leaf, (kind, value) in enumerate(self.module.program.outputs)
                   if leaf not in self.module.returned_caches)

    def outputs_of(self, results: Sequence[torch.Tensor | None],
                   caches: Sequence[object] = ()) -> Any:
        """The results as the model returns them; those that are not returned may be None."""
        flat = [results[value] if kind == "result" else value
                for kind, value in self.module.program.outputs]
        for leaf, number in self.module.returned_caches.items():
            flat[leaf] = caches[number]
        spec = self.module.out_spec
        return flat[0] if spec.is_leaf() else pytree.tree_unflatten(flat, spec)

    def _require_no_alias(self, operands) -> None:
        """What the model updates must not be seen under another name: the trace did not."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in operands]
        if places == self._checked_layout:
            return
        pair = aliasing_pair(operands, set(self.updated.values()))
        if pair is not None:
            one, other = (self.module.program.arguments[position].name for position in pair)
            raise ValueError(
                f"expected '{one}', which the model updates in place, in memory of its own, found "
                f"it shared with '{other}'; pass a clone")
        self._checked_layout = places


def another_constant(name: str, old: object, new: object) -> ValueError:
    return ValueError(f"input '{name}': expected {old!r}, the value at export, found {new!r}; "
                      "export again with it")


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a kernel may read the tensor: not fake, sharded, nor inside of a transform."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return not is_functorch_wrapped_tensor(tensor)
    return not is_traceable_wrapper_subclass(tensor) and not isinstance(
        tensor, FakeTensor)


def _plain(tensor):
    """Contiguous memory without gradients, with negations of views carried out."""
    return tensor.detach().resolve_neg().contiguous()


def _compile_function(module: Module, target: str, kernel_configs):
    """The module's function of inputs and result buffers."""
    from ..compiler.jit import compile_cached, compile_kernels_cached, with_kernel_configs

    text = with_kernel_configs(module.text, kernel_configs)
    if target == "cpu":
        return compile_cached(text).function(module.function)
    from ..artifact import KernelFunction
    from ..gpu.launch import LaunchPlan

    code = json.loads(compile_kernels_cached(text, target))
    plans = {f["name"]: LaunchPlan(f) for f in code["functions"]}
    return KernelFunction(code["ptx"], plans[module.function], target)
