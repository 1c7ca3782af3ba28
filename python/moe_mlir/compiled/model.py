"""moe_mlir.compile: a model as a function of compiled code."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch

from .._native import native
from .._support.log import warn_user
from .._torch.core import innermost_transform, is_any_autocast_enabled, pytree
from .._transformers.names import given_cache, with_cache_name
from .._transformers.static_cache import caches_of, flatten_caches, unfit_for_static_generate
from ..compiler.chips import target_chips
from ..frontends.export import Module, check_inputs, export
from ..frontends.trace_errors import TraceFailed
from ..guards.model_form import same_constant
from ..packing import give_back, lend, lent
from .lent_weights import export_lent
from .program import CallMismatch, CompiledProgram, another_constant

_log = logging.getLogger("moe_mlir.compile")
# The programs of one model; the one that was not used for longest goes first. DeepSeek-V4 has 16 for
# steps alone, by what its buffers of tokens hold.
_MOST_PROGRAMS, _MOST_WITH_CACHES = 8, 32
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Tracing sets modes of the process.
_tracing = threading.RLock()


def compile(
    model_or_module: torch.nn.Module | torch.export.ExportedProgram | Module,
    args: tuple[Any, ...] | None = None,
    *,
    target: str = "cpu",
    kwargs: Mapping[str, Any] | None = None,
    kernel_configs: Mapping[str, str] | None = None,
    pack: bool = True,
) -> CompiledModel:
    """Compiles a model and returns a callable with the model's signature.

    Args:
        model_or_module: a torch.nn.Module, an ExportedProgram, or the Module
            that `moe_mlir.export` returned.
        args: example inputs, as a tuple; batch sizes and token counts stay dynamic.
        target: "cpu", this machine, or a chip such as "sm_90": then inputs and
            weights are CUDA tensors, or CPU tensors inside `moe_mlir.simulate`.
        kwargs: example keyword inputs. Those that are not tensors hold for
            all calls, which need not repeat them.
        kernel_configs: selects kernels by the names of ops, in the syntax of
            `#moe.kernel_config`; unspecified parts are chosen by the compiler.
            Names of ops that the graph does not have are ignored:

                moe_mlir.compile(model, (x,), target="sm_90",
                                 kernel_configs={"softmax_mix": "<rows = 64, schedule = mma>"})
        pack: stores the weights of a model in evaluation mode in the order in which the kernels
            read them, in place, as `pack_experts` and `pack_linears` do: decoding is faster, the
            results of compiled code are the same. What cannot be packed stays as it is. Experts
            of transformers run with the implementation "moe" from then on. Weights that require
            gradients are given back by the first call of the model outside of compiled code with
            gradients enabled. Only for target "cpu". False leaves the model as it is.

    Raises:
        ValueError: the target, or a requested kernel, does not exist; the
            message lists the valid ones.

    The callable reads the model's own weights at each call. It is for
    inference: its results have no gradients. If a call does not match the
    compiled program (other keywords, a size for which the model takes another
    branch, another dtype of the weights, the other training mode), the model is
    traced and compiled again for it. A Module or an ExportedProgram cannot be
    traced again, so such calls raise an error.
    """
    targets = ["cpu", *target_chips()]
    if target not in targets:
        raise ValueError(f"expected 'target' to be one of {', '.join(targets)}, found {target!r}")
    _check_kernel_configs(kernel_configs)
    if isinstance(model_or_module, Module):
        return CompiledModel(model_or_module, target, kernel_configs=kernel_configs)
    with _tracing:
        module = _first_module(model_or_module, args, kwargs, target, pack)
    return CompiledModel(module, target, module.model is not None, kernel_configs)


def _first_module(model, args, kwargs, target, pack) -> Module:
    """The program of the example, of a model whose weights are packed before."""
    if isinstance(model, torch.export.ExportedProgram):
        return export(model, args, kwargs=kwargs)
    check_inputs(model, args, kwargs)
    if target != "cpu":
        give_back(model)
    is_first = not lent(model)
    if pack and target == "cpu":
        lend(model)
    try:
        return export_lent(model, args, kwargs)
    except BaseException:
        if is_first:
            give_back(model)
        raise


def _check_kernel_configs(configs) -> None:
    if configs is None:
        return
    if not isinstance(configs, Mapping) or not all(
            isinstance(text, str) for pair in configs.items() for text in pair):
        raise TypeError("expected 'kernel_configs' to map names of ops to configurations, such as "
                        f"{{'softmax_mix': '<schedule = mma>'}}, found {configs!r}")


class CompiledModel:
    """A model's programs, as one callable.

    Attributes:
        model: the torch.nn.Module whose weights it reads; None for an ExportedProgram.
        module: the MLIR of the example's program.
        target: what it is compiled for.

    `parameters`, `state_dict`, `to`, `train` and what else deals with weights
    are the model's.
    """

    def __init__(self, module: Module, target: str = "cpu", can_retrace: bool = False,
                 kernel_configs: Mapping[str, str] | None = None):
        self.module, self.model, self.target = module, module.model, target
        self._can_retrace, self._kernel_configs = can_retrace, dict(kernel_configs or {})
        self._prepare()
        self._programs = (CompiledProgram(module, target, self._named, self._kernel_configs),)
        self._fixed = self._programs[0].fixed
        # Which kind of cache `generate` makes; None before the first call.
        self._cache_of_generate: str | None = None

    def _prepare(self) -> None:
        """What a copy, or another process, makes anew."""
        self._lock = threading.Lock()
        self._guarded = native().GuardedCalls(_PLAIN_TENSORS, torch.dtype, torch.device,
                                              innermost_transform)
        self._run_guarded = self._guarded.run
        self._signature = None if self.model is None else inspect.signature(self.model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        autocast = is_any_autocast_enabled()
        found = NotImplemented if autocast else self._run_guarded(args, kwargs)
        if found is not NotImplemented:
            program, outputs = found
            if program is not self._programs[0]:
                self._use(program)
            return outputs
        values = self._values(args, kwargs)
        program, call = self._find(values)
        if program is None:
            program, call = self._retrace(values, args, kwargs)
        results = program.run(call)
        given = [parts.cache for parts in caches_of(values)]
        caches = program.change_caches(given, call, results)
        outputs = program.outputs_of(results, caches)
        if not autocast:  # guarded calls do not look for it
            program.remember(self._guarded, args, kwargs, values, call, results, outputs)
        return outputs

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `model.generate`, whose forward is this compiled code.

        The cache is one of fixed size, cache_implementation="static", if the
        call names none and the model can have one, and otherwise one that
        grows. Each size of a fixed cache is a program of its own, for the
        prompt and for a step.
        """
        if self.model is None or not hasattr(self.model, "generate"):
            raise AttributeError("expected a model of transformers that generates, found "
                                 f"{type(self.model).__name__}, which has no 'generate'")
        kwargs = with_cache_name(self.model, kwargs)
        if given_cache(kwargs) is None:
            kwargs.setdefault("cache_implementation", self._cache_implementation())
        # The same modules and weights, with another forward.
        runner = copy.copy(self.model)
        runner.forward = self
        return runner.generate(*args, **kwargs)

    def _cache_implementation(self) -> str:
        if self._cache_of_generate is None:
            why = unfit_for_static_generate(self.model)
            if why is not None:
                _log.info("%s generates with a cache that grows, since one of fixed size does not "
                          "fit it: %s", type(self.model).__name__, why)
            self._cache_of_generate = "static" if why is None else "dynamic"
        return self._cache_of_generate

    @property
    def __signature__(self) -> inspect.Signature:
        """What `inspect.signature` says of it: the inputs of the model."""
        if self._signature is None:
            raise AttributeError("__signature__")
        return self._signature

    # ---- inputs by name ----------------------------------------------------

    def _named(self, args, kwargs) -> dict:
        """The inputs by the names of the model's forward, in the order in which they are given."""
        if self._signature is None:
            return {**dict(enumerate(args)), **kwargs}
        kwargs = with_cache_name(self.model, kwargs)
        named = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            else:
                named["*" + name if kind is inspect.Parameter.VAR_POSITIONAL else name] = value
        in_order = [name for name in named if name not in kwargs] + list(kwargs)
        return {name: named[name] for name in in_order}

    def _values(self, args, kwargs) -> dict:
        """The inputs of a call by name: with the example's fixed ones, without defaults."""
        try:
            named = self._named(args, kwargs)
        except TypeError as error:
            raise TypeError(
                "expected the inputs that the model was exported with, "
                f"{[a.name for a in self.module.program.arguments if a.kind == 'input']}, found "
                f"{len(args)} positional and keyword inputs {sorted(kwargs)}: {error}") from None
        named = flatten_caches(named, self.model)
        for name, value in self._fixed.items():
            if name == "use_cache" and (caches_of(named) or name in named):
                continue  # asked for by a call, or said of those without a cache
            found = named.setdefault(name, value)
            if not same_constant(value, found):
                raise another_constant(name, value, found)
        return self._without_defaults(named)

    def _without_defaults(self, named) -> dict:
        """The inputs that are not what the model's forward has by itself, and the fixed ones."""
        defaults = {} if self._signature is None else self._signature.parameters
        return {name: value for name, value in named.items() if name in self._fixed
                or name not in defaults or not same_constant(defaults[name].default, value)}

    # ---- programs ----------------------------------------------------------

    def _find(self, values):
        """The program for a call and what it runs with; (None, None) if one can be traced."""
        mismatches = []
        for program in self._programs:
            try:
                call = program.fit(values)
            except CallMismatch as mismatch:
                mismatches.append(mismatch)
                continue
            if program is not self._programs[0]:
                self._use(program)
            return program, call
        final = next((m for m in mismatches if not m.can_retrace), None)
        if final is not None or not self._can_retrace or not _has_tensors(values):
            raise (final or mismatches[0]).error
        _log.info("tracing another program: %s", mismatches[0])
        return None, None

    def _use(self, program) -> None:
        """Puts the program first."""
        with self._lock:
            programs = (program, *(p for p in self._programs if p is not program))
            most = _MOST_WITH_CACHES if any(p.module.cache_changes for p in programs) else _MOST_PROGRAMS
            if len(programs) > most:
                warn_user(
                    f"{type(self.model).__name__} was called in more than {most} ways, "
                    "each of which is a program of its own; the oldest is dropped. "
                    "MOE_MLIR_LOGS=compile shows why")
                self._guarded.forget()  # of the one that goes, too
            self._programs = programs[:most]

    def _retrace(self, values, args, kwargs):
        """A further program, with this call as its example."""
        with _tracing:
            program, call = self._find(values)  # another thread may have made it
            if program is not None:
                return program, call
            given = self._named(args, kwargs)
            kwargs = {**kwargs, **{n: v for n, v in values.items()
                                   if n in self._fixed and n not in given}}
            try:
                program, call = self._program_of(values, args, kwargs)
            except CallMismatch as mismatch:
                raise mismatch.error from None
            except Exception as error:  # the model's own code may refuse it, however it likes
                raise self._refusal(values, error) from error
            self._use(program)
            return program, call

    def _program_of(self, values, args, kwargs):
        """A program that fits the call, and what it runs with."""
        def name_inputs(args, kwargs):
            return self._without_defaults(self._named(args, kwargs))

        def trace(**options):
            program = CompiledProgram(export_lent(self.model, args, kwargs, **options),
                                      self.target, name_inputs, self._kernel_configs)
            return program, program.fit(values)
        try:
            return trace()
        except CallMismatch as mismatch:
            if not mismatch.is_size:
                raise
            # torch takes open sizes for larger than 0: what it says of others may not hold there.
            return trace(dynamic_tokens=False)

    def _refusal(self, values, error) -> Exception:
        """What to say of a call that cannot be traced: the size that is at fault, or torch's words.

        What is said in our own words is no matter of sizes: an operation that is not supported, or
        control flow that depends on data.
        """
        if isinstance(error, (native().MoeError, TraceFailed, TypeError)):
            return error
        for program in self._programs:
            try:
                program.fit(values)
            except CallMismatch as mismatch:
                if mismatch.is_size:
                    return mismatch.error
        return error

    # ---- the model's own ---------------------------------------------------

    def __getattr__(self, name):
        model = vars(self).get("model")
        if model is None or name.startswith("__"):
            raise AttributeError(f"'CompiledModel' has no attribute '{name}'")
        value = getattr(model, name)
        if name in _OF_WEIGHTS or not callable(value):
            return value
        if name in _CHANGES:
            return lambda *args, **kwargs: (value(*args, **kwargs), self)[1]
        raise AttributeError(f"a compiled model has no '{name}', which would run "
                             f"{type(model).__name__} itself, not compiled; use .model.{name}")

    def __getstate__(self):
        return {n: v for n, v in vars(self).items() if n not in _MADE_ANEW}

    def __setstate__(self, state):
        vars(self).update(state)
        self._prepare()

    def __repr__(self):
        name = "a program" if self.model is None else type(self.model).__name__
        count = len(self._programs)
        return f"<{name} compiled for {self.target}, {count} program{'s' if count != 1 else ''}>"


# Attributes that `_prepare` makes.
_MADE_ANEW = {"_lock", "_signature", "_guarded", "_run_guarded"}
# Methods of the model that tell of its weights, and those that change it and return it.
_OF_WEIGHTS = {"parameters", "named_parameters", "buffers", "named_buffers", "modules",
               "named_modules", "children", "named_children", "state_dict", "load_state_dict",
               "get_parameter", "get_buffer", "get_submodule", "zero_grad", "save_pretrained"}
_CHANGES = {"to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type", "train", "eval",
            "requires_grad_"}


def _has_tensors(values) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(values))


__all__ = ["CompiledModel", "compile"]
