"""A model's program for a file: its results are tensors alone, and have names."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import OutputKind

from .._torch.core import pytree
from .._transformers.names import cache_name
from .._transformers.static_cache import caches_of
from .._transformers.without_cache import warn_without_cache
from ..frontends.export import Example, Inputs, input_names, trace_example
from ..raising.doubled_state import merge_doubled_state
from ..raising.guards import guards_of

# Of the names of weights, which is that of the model inside of `Inputs`.
PREFIX = "wrapped_model."


@dataclass
class Program:
    """A program in operators of torch and ours, without writes in place.

    Attributes:
        inputs: torch's names of the inputs -> those of the model's forward.
        outputs: the names of the results.
        conditions: what the model's code asked of open sizes, and what does not hold for all of
            them, as texts over torch's symbols: other sizes take another way through its code.
    """

    program: torch.export.ExportedProgram
    inputs: dict[str, str]
    outputs: list[str]
    conditions: list[str]


@dataclass
class _Results:
    """The names of results; torch.export takes back what is written to a module, but not to this."""

    names: list[str]


class _TensorResults(Inputs):
    """The model as a function from tensors to tensors.

    Other results, such as numbers, are left out. Tensors of a cache come last.
    """

    def __init__(self, model, leaves, spec):
        super().__init__(model, leaves, spec)
        self.results = _Results([])

    def forward(self, *tensors):
        outputs = super().forward(*tensors)
        made: list[torch.Tensor] = []
        if any(self.seen.cache_results):
            outputs, made = outputs
        found = [(_name(path), leaf) for path, leaf in pytree.tree_flatten_with_path(outputs)[0]
                 if isinstance(leaf, torch.Tensor)]
        self.results.names = [name for name, _ in found]
        return [*(leaf for _, leaf in found), *made]


def _name(path) -> str:
    """The name of a result: the fields of a ModelOutput or a dict, `output_0` of a tuple."""
    parts = [str(getattr(part, kind)) for part in path for kind in ("key", "idx", "name")
             if hasattr(part, kind)]
    text = ".".join(parts)
    return f"output_{text}" if text[:1].isdigit() else text or "output"


def program_of(
    model: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any] | None, dynamic: bool,
) -> Program:
    """The program of an example.

    Raises:
        ValueError: the model changes its inputs or buffers, which a file cannot.
    """
    example = Example(model, args, kwargs, dynamic)
    caches = caches_of(example.parts)
    if dynamic and caches and all(cache.form.grows for cache in caches):
        _open_sequences(example, caches)
    inputs = _TensorResults.of(model, example)
    traced = trace_example(model, inputs, example, finish=merge_doubled_state, routing="torch")
    warn_without_cache(model, args, kwargs)
    names = input_names(model, example.spec, example.leaves)
    asked = _conditions(traced.program)
    # The checks of its inputs' sizes, which torch makes of the example, read inputs that a program
    # does without.
    traced.program.example_inputs = None
    with warnings.catch_warnings():
        # torch copies its own tree specs in a way that it deprecated itself.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        program = traced.program.run_decompositions({})
    _refuse_writes(program, caches)
    made = _names_of_cache(model, names, sum(traced.cache_results))
    return Program(program, names, [*inputs.results.names, *made], asked)


def _open_sequences(example, caches) -> None:
    """Compiled code keeps the number of sequences of a cache; a file is for any."""
    state = {id(tensor) for cache in caches for tensor in cache.state}
    for tensor, dims in zip(example.tensors, example.dims):
        if tensor.dim() > 1 and tensor.shape[0] > 1 and 0 not in dims and (
                id(tensor) in state or tensor.shape[0] == caches[0].sequences):
            dims.insert(0, 0)


# Sizes that conditions are tried with. Those of 0 and 1 are cases of their own to torch, not to
# what it computes.
_SIZES = (2, 3, 31, 1000, 100_000)


def _conditions(program) -> list[str]:
    found = []
    for guard in dict.fromkeys(guards_of(program)):
        symbols = sorted(guard.free_symbols, key=str)
        # Of many symbols one at a time, beside a size that is none of the others.
        sizes = itertools.product(_SIZES, repeat=len(symbols)) if len(symbols) <= 3 else \
            ([37] * i + [size] + [37] * (len(symbols) - i - 1)
             for i in range(len(symbols)) for size in _SIZES)
        if not all(guard.subs(dict(zip(symbols, each))) == True  # noqa: E712 sympy
                   for each in sizes):
            found.append(str(guard))
    return found


def _names_of_cache(model, names, count) -> list[str]:
    """What a call makes for its caches, by the inputs that it replaces."""
    name = cache_name(model)
    given = [f"new.{text}" for text in names.values() if text.startswith(f"{name}.")]
    return given if len(given) == count else [f"new.{name}.{i}" for i in range(count)]


def _refuse_writes(program, caches) -> None:
    kinds = (OutputKind.USER_INPUT_MUTATION, OutputKind.BUFFER_MUTATION,
             OutputKind.PARAMETER_MUTATION)
    changed = [spec.target for spec in program.graph_signature.output_specs if spec.kind in kinds]
    if changed:
        advice = "give it a cache that grows, such as transformers.DynamicCache" if caches else \
            "a file keeps no state from call to call"
        raise ValueError("onnx.export: expected a model that changes no inputs and no buffers, found "
                         f"that it writes {len(changed)} ('{changed[0].removeprefix(PREFIX)}'); "
                         f"{advice}")
