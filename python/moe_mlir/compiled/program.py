"""One traced program as compiled code: which calls it serves, and how it runs them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._native import native
from .._torch.core import (
    FakeTensor,
    autocast_in_use,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
    pytree,
)
from .._transformers.cache_state import (
    SMALLEST_SIZE,
    CacheTensors,
    ResultNumber,
    SizeText,
    Structure,
    put,
)
from .._transformers.model_outputs import output_form
from .._transformers.static_cache import caches_of, limits_of, part_kinds
from .._transformers.token_inputs import token_count
from ..frontends.export import Module
from ..gpu.sizes import describe_condition, evaluate_text, names_in, unmet_condition
from ..guards.model_form import same_constant
from .cache_counters import counters_of


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
    """What code is run with: its operands, (sizes, dtype) of each result, and open sizes by name."""

    operands: list[torch.Tensor]
    results: list[tuple[list[int], torch.dtype]]
    symbols: dict[str, int]


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
        # Inputs without tensors: what the example says holds for every call. An empty cache is none.
        self.fixed = {name: named[name] for name, _, leaves in self._forms
                      if not any(leaf is _TENSOR for leaf in leaves)
                      and not isinstance(named[name], CacheTensors)}
        # Inputs that say what a cache counts.
        self._counters = {f"{name}.{counter}": f"({name}.{counter} + {SMALLEST_SIZE})"
                          for name, value in named.items() if isinstance(value, CacheTensors)
                          for counter in value.form.counter_names}
        arguments = module.program.arguments
        self.inputs = [i for i, a in enumerate(arguments) if a.kind == "input"]
        self.weights = [(i, a.name) for i, a in enumerate(arguments) if a.kind == "state"]
        self._positions = {(a.kind, a.name): i for i, a in enumerate(arguments)}
        # result -> the argument that it updates
        self.updated = {i: self._positions[r.kind, r.name]
                        for i, r in enumerate(module.program.results) if r.kind != "output"}
        # A trace of a model has what autocast made of it.
        self._autocast = None if module.model is None else autocast_in_use()
        self._prepare()

    def _prepare(self) -> None:
        """What a copy, or another process, makes anew."""
        self.function = _compile_function(self.module, self.target, self._kernel_configs)
        self._conditions = native().OperandConditions()
        for argument in self.module.program.arguments:
            sizes = [size if isinstance(size, int) else -1 for size in argument.shape]
            # Widths of inputs, too, are for `_symbols` to say.
            is_weight = argument.kind == "state"
            self._conditions.add(torch.empty(0, dtype=argument.dtype),
                                 sizes if is_weight else [-1] * len(sizes), is_weight)

    def __getstate__(self):
        return {n: v for n, v in vars(self).items() if n not in ("function", "_conditions")}

    def __setstate__(self, state):
        vars(self).update(state)
        self._prepare()

    # ---- which calls -------------------------------------------------------

    def fit(self, values: dict) -> Call:
        """What a call with these named inputs runs with; raises CallMismatch."""
        if self._autocast not in (None, now := autocast_in_use()):
            raise CallMismatch(RuntimeError(
                f"expected {_autocast_text(self._autocast)}, as when the model was traced, found "
                f"{_autocast_text(now)}"), can_retrace=True)
        tensors = self._tensors(values)
        operands = [None] * len(self.module.program.arguments)
        self._read_weights(operands)
        for position, tensor in zip(self.inputs, tensors, strict=True):
            operands[position] = tensor
        self._check_kinds(operands)
        symbols = self._symbols(operands)
        return Call(operands, [([evaluate_text(size, symbols) for size in r.shape], r.dtype)
                               for r in self.module.program.results], symbols)

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
        state = self.module.state
        change = state.change()
        if change:
            raise CallMismatch(ValueError(f"expected the model as it was exported, found {change}; export "
                                          "it again"), can_retrace=True)
        for position, name in self.weights:
            try:
                operands[position] = state[name]
            except ValueError as error:  # None is in its place
                raise CallMismatch(error, can_retrace=True) from None

    def _check_kinds(self, operands) -> None:
        """What no other size could mend: types, dims, layouts, devices."""
        for positions in ([position for position, _ in self.weights], self.inputs):
            unmet = self._conditions.first_unmet(operands, positions)
            if unmet is not None:
                position, condition = unmet
                argument = self.module.program.arguments[position]
                explain = _unmet_by_weight if argument.kind == "state" else _unmet_by_input
                raise (explain(condition, argument, operands[position])
                       or self._unreadable(argument, operands[position], operands))
        self._check_devices(operands)

    def _check_devices(self, operands) -> None:
        """All on the CPU, or on one GPU if the code is for one."""
        device = operands[0].device if operands else torch.device("cpu")
        for argument, tensor in zip(self.module.program.arguments, operands):
            if tensor.device != device or not self._can_read(tensor):
                raise self._unreadable(argument, tensor, operands)

    def _can_read(self, tensor) -> bool:
        allowed = ("cpu",) if self.target == "cpu" else ("cpu", "cuda")
        return tensor.device.type in allowed and has_plain_memory(tensor)

    def _unreadable(self, argument, tensor, operands) -> CallMismatch:
        """What keeps compiled code from the memory of a tensor."""
        allowed = ("cpu",) if self.target == "cpu" else ("cpu", "cuda")
        device = operands[0].device
        if tensor.device.type not in allowed or tensor.device != device:
            kind = "input" if argument.kind == "input" else "weight"
            expected = "a CPU tensor" if self.target == "cpu" else f"a tensor on {device}"
            return CallMismatch(TypeError(f"{kind} '{argument.name}': expected {expected}, found "
                                          f"{tensor.device}"))
        return CallMismatch(TypeError(
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
        names = {name: program.arguments[position].name
                 for name, (position, _) in program.symbols.items()}
        places = {name: (self._counters[names[name]], None) if names[name] in self._counters else
                  (names[name], dim) for name, (_, dim) in program.symbols.items()}
        is_counter = any(places[name][1] is None for name in names_in(unmet[0]))
        why, what_to_do = (
            ("the program was exported", "export it with sizes that include this one")
            if self.module.model is None else
            ("the model's own code asked when it was traced",
             "compile the model with an example of that size, too"))
        raise CallMismatch(ValueError(f"{describe_condition(unmet, symbols, places, why)}; "
                                f"{what_to_do}"), can_retrace=True, is_size=not is_counter)

    # ---- the run -----------------------------------------------------------

    @torch.no_grad()
    def run(self, call: Call) -> list[torch.Tensor]:
        """The results of the code for what `fit` gave; updates what the model updates."""
        operands = call.operands
        if self.updated:
            self._require_no_alias(operands)
        plain = [_plain(tensor) for tensor in operands]
        device = operands[0].device if operands else torch.device("cpu")
        # The code stores updates in their arguments, which are no results then.
        results = [plain[self.updated[i]] if i in self.updated else
                   torch.empty(sizes, dtype=dtype, device=device)
                   for i, (sizes, dtype) in enumerate(call.results)]
        self.function(*plain, *(r for i, r in enumerate(results) if i not in self.updated))
        for result, position in self.updated.items():
            if results[result].data_ptr() != operands[position].data_ptr():
                operands[position].copy_(results[result])
        return results

    def change_caches(self, given: Sequence[object], call: Call,
                      results: Sequence[torch.Tensor]) -> list[object]:
        """The caches that a call was given, and those that it makes, as they are after it.

        Its tokens are counted, flags set, and the tensors that were made for them put in.
        """
        outputs, all_changes = self.module.program.outputs, self.module.cache_changes
        caches = [*given, *(changes[0][1].make() for changes in all_changes[len(given):])]
        start = len(outputs) - sum(self.module.cache_results)
        for cache, changes, count in zip(caches, all_changes, self.module.cache_results):
            for path, value in changes:
                if isinstance(value, Structure):
                    value.give(cache)
                    continue
                if isinstance(value, SizeText):
                    value = evaluate_text(value, call.symbols)
                elif isinstance(value, ResultNumber):
                    value = results[outputs[start + value][1]]
                put(cache, path, value)
            start += count
        return caches

    def remember(self, calls: Any, args: tuple, kwargs: dict, values: dict, call: Call,
                 results: Sequence[torch.Tensor], outputs: Any) -> None:
        """Lets GuardedCalls run calls like this one, which ran, without another look."""
        caches = caches_of(values)
        if (self.target != "cpu" or self._returns_updated or len(caches) > 1
                or any(self.module.cache_results)):
            return
        state, tokens = self.module.state, token_count(values, self.module.model)
        counters = []
        for parts in caches:
            found = counters_of(self.module, parts, call.symbols)
            if found is None:
                return
            counters += found
        for parts in caches:
            for kind in part_kinds(parts.cache):
                calls.add_part(*kind)
        numbers = ((position, state.number(name)) for position, name in self.weights)
        calls.remember(
            args, kwargs, program=self, function=self.function, guard=state.guard,
            operands=call.operands,
            inputs=[i for i in self.inputs if all(i != counter.operand for counter in counters)],
            updated=[*self.updated.values()],
            weights=[pair for pair in numbers if pair[1] is not None],
            results=[None if i in self.updated else r for i, r in enumerate(results)],
            limits=[limit for parts in caches for limit in limits_of(parts, tokens)],
            counters=counters,
            leaves=self._leaves, form=self._form_of(outputs))

    @property
    def _returns_updated(self) -> bool:
        """Whether outputs are results that update an argument, other than a cache that was given."""
        return any(kind == "result" and value in self.updated
                   for leaf, (kind, value) in enumerate(self.module.program.outputs)
                   if leaf not in self.module.returned_caches)

    @property
    def _leaves(self) -> list[tuple[str, Any]]:
        """Of each leaf of the outputs where it is: a result, a cache that was given, a constant."""
        caches = self.module.returned_caches
        return [("argument", caches[leaf]) if leaf in caches else
                (kind if kind == "result" else "constant", value)
                for leaf, (kind, value) in
                enumerate(self.module.program.outputs[:self.module.out_spec.num_leaves])]

    def outputs_of(self, results: Sequence[torch.Tensor], caches: Sequence[object] = ()) -> Any:
        """The results as the model returns them."""
        where = {"result": results, "argument": caches}
        return self._build([where[kind][value] if kind in where else value
                            for kind, value in self._leaves])

    def _build(self, leaves: list) -> Any:
        spec = self.module.out_spec
        return leaves[0] if spec.is_leaf() else pytree.tree_unflatten(leaves, spec)

    def _form_of(self, outputs: Any) -> Any:
        """How GuardedCalls makes outputs like these of their leaves."""
        spec = self.module.out_spec
        if spec.is_leaf():
            return None
        leaves = pytree.tree_leaves(outputs)
        if type(outputs) in (tuple, list) and len(leaves) == len(outputs) and all(
                a is b for a, b in zip(leaves, outputs)):
            return type(outputs)
        return output_form(outputs, leaves) or self._build

    def _require_no_alias(self, operands) -> None:
        """What the model updates must not be seen under another name: the trace did not."""
        pair = native().aliasing_pair(operands, [*self.updated.values()])
        if pair is not None:
            one, other = (self.module.program.arguments[position].name for position in pair)
            raise ValueError(
                f"expected '{one}', which the model updates in place, in memory of its own, found "
                f"it shared with '{other}'; pass a clone")


def _unmet_by_weight(condition: str, argument: Any, tensor: torch.Tensor) -> CallMismatch | None:
    """What to say of a weight that does not meet a condition; None for its memory."""
    if condition == "memory":
        return None
    if condition == "strides":
        return CallMismatch(ValueError(
            f"expected parameter '{argument.name}' to be contiguous, found strides "
            f"{tuple(tensor.stride())}; call .contiguous() on it"))
    return CallMismatch(TypeError(
        f"weight '{argument.name}': expected {argument.dtype} {list(argument.shape)}, "
        f"as at export, found {tensor.dtype} {list(tensor.shape)}; export the model "
        "again"), can_retrace=True)


def _unmet_by_input(condition: str, argument: Any, tensor: Any) -> CallMismatch | None:
    """What to say of an input that does not meet a condition; None for its memory."""
    if not isinstance(tensor, torch.Tensor):
        problem: Exception = TypeError(f"expected a tensor, found {type(tensor).__name__}")
    elif tensor.layout is not torch.strided:
        problem = TypeError(f"expected a dense tensor, found {tensor.layout}")
    elif tensor.dtype != argument.dtype:
        problem = TypeError(f"expected {argument.dtype}, found {tensor.dtype}")
    elif tensor.dim() != len(argument.shape):
        problem = ValueError(f"expected {len(argument.shape)} dims, found shape "
                             f"{tuple(tensor.shape)}")
    else:
        return None
    return CallMismatch(type(problem)(f"input '{argument.name}': {problem}"))


def _autocast_text(kinds) -> str:
    return " and ".join(f"autocast to {str(dtype).removeprefix('torch.')} on {kind}"
                        for kind, dtype in kinds) or "no autocast"


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
