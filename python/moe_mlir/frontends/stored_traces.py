"""Programs of models in the disk cache: what `moe_mlir.export` makes of a trace, for another process.

A trace takes seconds a model, in each process anew. Its program is found again by all that it depends
on: the model and its code (`guards.trace_key`), the inputs but for their open sizes, and the cache
among them. An entry has several programs where a model's code asks for sizes; one whose conditions
hold is taken. Programs with caches that grow are not stored.

`MOE_MLIR_CACHE_TRACES=0` turns it off.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .._support.log import logger
from .._torch.core import pytree
from .._transformers.cache_state import CacheTensors, parts_of
from .._transformers.static_cache import caches_of
from ..compiler import cache
from ..gpu.sizes import evaluate_text, unmet_condition
from ..guards.model_weights import is_of_model
from ..guards.trace_key import NoKey, trace_key
from ..importer import ImportedProgram

# Programs of one entry, and bytes of the constants of one.
_MOST_PROGRAMS = 8
_MOST_OF_CONSTANTS = 16 << 20


@dataclass
class TracedModule:
    """What a trace of a model gives, without the model.

    Attributes:
        program: the IR, its arguments and results.
        names: the weights that it reads of the model.
        constants: tensors that the trace made, by name.
        out_spec: the structure of the outputs.
        returned_caches, cache_changes, cache_results, conditions, misread: as `Module` has them.
    """

    program: ImportedProgram
    names: list[str]
    constants: dict[str, torch.Tensor]
    out_spec: pytree.TreeSpec
    returned_caches: dict = field(default_factory=dict)
    cache_changes: list = field(default_factory=list)
    cache_results: list[int] = field(default_factory=list)
    conditions: list = field(default_factory=list)
    misread: list[str] = field(default_factory=list)

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether inputs have sizes for which the program was made."""
        arguments = self.program.arguments
        positions = [i for i, argument in enumerate(arguments) if argument.kind == "input"]
        given = dict(zip(positions, tensors, strict=True))
        symbols = {name: given[position].shape[dim]
                   for name, (position, dim) in self.program.symbols.items()}
        return unmet_condition(self.conditions, symbols) is None and all(
            list(tensor.shape) == [evaluate_text(size, symbols) for size in arguments[position].shape]
            for position, tensor in given.items())


class StoredTraces:
    """The programs in the disk cache of one model for inputs of one form.

    Args:
        model: the module.
        inputs: positional and named ones, with their caches as `CacheTensors`.
        tensors: those among them, in order.
        dims: of each the open dims; None: all sizes are fixed.
    """

    def __init__(self, model: torch.nn.Module, inputs: dict, tensors: Sequence[torch.Tensor],
                 dims: Sequence[Sequence[int]] | None):
        self._model, self._tensors = model, tensors
        self._entry = _entry(model, inputs, tensors, dims)

    def find(self) -> TracedModule | None:
        """A program that serves the inputs."""
        found = next((traced for traced in self._load() if traced.serves(self._tensors)
                      and all(is_of_model(self._model, name) for name in traced.names)), None)
        if self._entry is not None:
            self._log("%s the program of %s", "found" if found else "missed", self._entry[1][:16])
        return found

    def add(self, traced: TracedModule) -> None:
        """Stores a program, in front of those for other sizes."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in traced.constants.values())
        if self._entry is None or any(traced.cache_results) or size > _MOST_OF_CONSTANTS:
            return
        try:
            payload = pickle.dumps([traced, *self._load()[:_MOST_PROGRAMS - 1]])
        except Exception as error:  # of whatever a model's outputs hold
            self._log("a program is not stored: %r", error)
            return
        store, key = self._entry
        store.store(key, payload)

    def _load(self) -> list[TracedModule]:
        if self._entry is None:
            return []
        store, key = self._entry
        payload = store.load(key)
        try:
            with warnings.catch_warnings():
                # torch's tree specs read what it deprecated itself.
                warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
                return [] if payload is None else pickle.loads(payload)
        except Exception as error:  # of classes that are no longer where they were
            self._log("a stored program cannot be read: %r", error)
            return []

    def _log(self, text, *values) -> None:
        logger("cache").debug(f"%s: {text}", type(self._model).__name__, *values)


def _entry(model, inputs, tensors, dims) -> tuple[cache.Cache, str] | None:
    """The disk cache and the key of the programs, where there is one."""
    if os.environ.get("MOE_MLIR_CACHE_TRACES") == "0" or any(p.form.grows for p in caches_of(inputs)):
        return None
    store = cache.open_default()
    if store is None:
        return None
    try:
        return store, cache.make_key("trace", trace_key(model, _forms(inputs), _kinds(tensors, dims)))
    except NoKey as reason:
        why = str(reason)
    except Exception as error:  # of objects of others, which do in attributes what they like
        why = repr(error)
    logger("cache").info("%s is traced in each process: its code has %s", type(model).__name__, why)
    return None


def _forms(inputs) -> list:
    """Inputs as what a trace depends on: without tensors, and with caches as their forms."""
    leaves, spec = pytree.tree_flatten(inputs, is_leaf=lambda x: isinstance(x, CacheTensors))
    return [spec, *map(_form, leaves)]


def _form(leaf):
    if isinstance(leaf, torch.Tensor):
        return "a tensor"
    if not isinstance(leaf, CacheTensors):
        return leaf
    form = leaf.form
    return [form.constants, form.tensors, form.counters, form.same,
            [type(part) for part in (leaf.cache, *parts_of(leaf.cache))]]


def _kinds(tensors, dims) -> list:
    """Dtypes, devices and layouts of inputs, and the sizes that a program takes as they are."""
    open_dims = [()] * len(tensors) if dims is None else dims
    return [(tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad,
             None if tensor.is_contiguous() else tensor.stride(),
             tuple(-1 if d in inner else size for d, size in enumerate(tensor.shape)))
            for tensor, inner in zip(tensors, open_dims, strict=True)]
