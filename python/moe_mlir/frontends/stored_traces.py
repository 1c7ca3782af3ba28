"""Programs of models in the disk cache: what `moe_mlir.export` makes of a trace, for another process.

A trace takes seconds a model, in each process anew. Its program is found again by all that it depends
on: the model and its code (`guards.trace_key`), the inputs but for their open sizes, and the cache
among them. An entry has several programs where a model's code asks for sizes; one whose conditions
hold is taken. Programs with caches that grow are not stored.

`MOE_MLIR_CACHE_TRACES=0` turns it off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .._torch.core import pytree
from .._transformers.cache_state import CacheTensors
from .._transformers.static_cache import caches_of
from ..gpu.sizes import evaluate_text, unmet_condition
from ..guards.model_entries import ModelEntry
from ..guards.model_weights import is_of_model
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
        self._entry = None if any(parts.form.grows for parts in caches_of(inputs)) else \
            ModelEntry("trace", model, _forms(inputs), _kinds(tensors, dims))

    def find(self) -> TracedModule | None:
        """A program that serves the inputs."""
        found = next((traced for traced in self._load() if traced.serves(self._tensors)
                      and all(is_of_model(self._model, name) for name in traced.names)), None)
        if self._entry is not None and self._entry.exists:
            self._entry.log("%s the program of %s", "missed" if found is None else "found",
                            self._entry.name)
        return found

    def add(self, traced: TracedModule) -> None:
        """Stores a program, in front of those for other sizes."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in traced.constants.values())
        if self._entry is not None and not any(traced.cache_results) and size <= _MOST_OF_CONSTANTS:
            self._entry.store([traced, *self._load()[:_MOST_PROGRAMS - 1]])

    def _load(self) -> list[TracedModule]:
        return (None if self._entry is None else self._entry.load()) or []


def _forms(inputs) -> list:
    """Inputs as what a trace depends on: without tensors, and with caches as their forms."""
    leaves, spec = pytree.tree_flatten(inputs, is_leaf=lambda x: isinstance(x, CacheTensors))
    return [spec, *map(_form, leaves)]


def _form(leaf):
    if isinstance(leaf, torch.Tensor):
        return "a tensor"
    return leaf.description if isinstance(leaf, CacheTensors) else leaf


def _kinds(tensors, dims) -> list:
    """Dtypes, devices and layouts of inputs, and the sizes that a program takes as they are."""
    open_dims = [()] * len(tensors) if dims is None else dims
    return [(tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad,
             None if tensor.is_contiguous() else tensor.stride(),
             tuple(-1 if d in inner else size for d, size in enumerate(tensor.shape)))
            for tensor, inner in zip(tensors, open_dims, strict=True)]
