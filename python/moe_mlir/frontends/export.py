"""moe_mlir.export: a torch model as an MLIR module."""

import inspect
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind

from .._support import files
from .._torch.core import autocast_in_use, autocast_of, pytree, size_oblivious_export
from .._transformers.cache_state import CacheTensors, Path, SizeText, is_cache
from .._transformers.growing_cache import contents_of, learn, open_dims
from .._transformers.static_cache import caches_of, flatten_caches
from .._transformers.without_cache import warn_without_cache, without_cache
from ..experts.packed_weight import Panels, hidden_gradients
from ..gpu.sizes import format_size, names_in
from ..guards.model_weights import ModelWeights, is_of_model
from ..importer import ImportedProgram, decompose_missing, import_program
from ..patching.expert_loops import loops_as_ops
from ..patching.substitution import substitutions_as_ops
from ..raising.einsum import EinsumAsMatmul
from ..raising.experts import raise_experts
from ..raising.grouped_heads import pack_grouped_heads
from ..raising.guards import (
    bounds_of,
    conditions,
    conditions_noted_since,
    count_noted,
    first_unequal_symbol,
    fixed_symbols,
    input_shapes,
    symbols_refusing,
)
from ..raising.pack_weights import pack_weights
from ..raising.plain_attention import raise_plain_attention
from ..raising.raise_routing import raise_routing
from ..raising.sink_attention import raise_sink_attention
from ..raising.sorted_ids import raise_sorted_ids
from ..raising.squeeze import SqueezeAsksSizes
from .assigned_buffers import AssignedBuffers
from .decompositions import decompose
from .module_casts import casts_without_effect
from .stored_traces import StoredTraces, TracedModule
from .trace_errors import TraceFailed, explained, require_weights_in_memory

_PREFIX = "wrapped_model."
_log = logging.getLogger("moe_mlir.export")


@dataclass
class Module:
    """A model as MLIR text, with the weights beside it.

    Attributes:
        text: the module's text; weights are arguments of its function.
        function: the name of the public function.
        state: parameters, buffers and constants by their dotted names, as the
            model holds them now: a later training step, or `.half()`, is seen.
        program: argument and result order, dtypes and sizes.
        conditions: what the model's code asked of open sizes, and what eager would refuse, as
            (size, relation, number), where a size is a name or a text such as "s0 % 4".
        model: the torch.nn.Module; None for an ExportedProgram.
    """

    program: ImportedProgram
    state: ModelWeights
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    # Leaves of the inputs that were numbers, flags or None: fixed at export.
    constants: dict = field(default_factory=dict)
    # Leaves of the outputs that are caches, by their numbers: those among the inputs, then those
    # that a call makes.
    returned_caches: dict = field(default_factory=dict)
    # Of each cache what a call changes beside its tensors: numbers, flags, and texts of sizes for
    # counters; of one that it makes, all that it has.
    cache_changes: list[list[tuple[Path, Any]]] = field(default_factory=list)
    # Of each cache how many tensors a call makes for it: results after the outputs.
    cache_results: list[int] = field(default_factory=list)
    conditions: list = field(default_factory=list)
    # Weights in panels that other functions than ours read, which take them for what they are not.
    misread: list = field(default_factory=list)
    model: torch.nn.Module | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        return self.program.text

    @property
    def function(self) -> str:
        return self.program.function

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the module: `.mlir` as text, `.mlirbc` as bytecode; no weights."""
        suffix = os.path.splitext(os.fspath(path))[1]
        if suffix == ".mlir":
            data = self.text.encode()
        elif suffix == ".mlirbc":
            from .._native import native
            data = native().Module.parse(self.text).bytecode()
        else:
            raise ValueError(f"expected a path that ends in .mlir or .mlirbc, found '{path}'")
        files.write(path, data)

    def __str__(self) -> str:
        return self.text


@contextmanager
def _routing_by(model, impl):
    """Routers of `moe_mlir.nn` run by ops ("moe") or by their plain-torch meaning ("torch")."""
    from ..nn import Router
    switched = [(m, m.impl) for m in model.modules() if isinstance(m, Router) and m.impl != impl]
    for router, _ in switched:
        router.impl = impl
    try:
        yield
    finally:
        for router, before in switched:
            router.impl = before


class Inputs(torch.nn.Module):
    """The model as a function of its tensor inputs alone.

    torch.export names dynamic dimensions after the forward's parameters, which
    decorated signatures hide; a flat list of tensors has one name for all.
    """

    def __init__(self, model, leaves, spec):
        super().__init__()
        self.wrapped_model = model
        self._leaves, self._spec = leaves, spec
        # A trace sees an autocast that it enters, and not one around it.
        self._autocast = autocast_in_use()
        self.seen = _Seen()

    @classmethod
    def of(cls, model, example):
        return cls(model, example.leaves, example.spec)

    def forward(self, *tensors):
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        parts, caches = [], []

        def build(value):
            if not isinstance(value, CacheTensors):
                return value
            parts.append(value)
            caches.append(value.build())
            return caches[-1]
        args, kwargs = pytree.tree_map(build, (args, kwargs),
                                       is_leaf=lambda x: isinstance(x, CacheTensors))
        buffers, shapes = AssignedBuffers(self.wrapped_model), [x.shape for x in tensors]
        with autocast_of(self._autocast):
            outputs = self.wrapped_model(*args, **kwargs)
        outputs = buffers.store(outputs)
        _require_shapes(tensors, shapes)
        outputs, own = self._without_caches(outputs, caches)
        found = [part.changes_of(cache) for part, cache in zip(parts, caches)]
        found += map(contents_of, own)
        given = [*parts, *[None] * len(own)]
        for cache, (changes, results), part in zip((*caches, *own), found, given, strict=True):
            learn(cache, changes, results, part)
        self.seen.cache_changes = [changes for changes, _ in found]
        self.seen.cache_results = [len(results) for _, results in found]
        made = [tensor for _, results in found for tensor in results]
        return (outputs, made) if made else outputs

    def _without_caches(self, outputs, caches):
        """The outputs, with numbers for the caches among them, and those that were not given."""
        leaves, spec = pytree.tree_flatten(outputs, is_leaf=is_cache)
        own: list[Any] = []
        returned = {}
        for i, leaf in enumerate(leaves):
            if is_cache(leaf):
                if not any(leaf is cache for cache in (*caches, *own)):
                    own.append(leaf)
                returned[i] = next(n for n, cache in enumerate((*caches, *own)) if leaf is cache)
        self.seen.returned_caches = returned
        return pytree.tree_unflatten([returned.get(i, leaf) for i, leaf in enumerate(leaves)],
                                     spec), own


class _Seen:
    """What a trace saw; torch.export takes back what is written to a module."""

    # Leaves of the outputs -> numbers of the caches that they are: those among the inputs, then
    # those that the model made.
    returned_caches: dict[int, int] = {}
    # Of each cache what the model changed beside its tensors.
    cache_changes: list[list[tuple[Path, Any]]] = []
    # Of each cache the number of tensors that the model made for it, which come after the outputs.
    cache_results: list[int] = []


def _dynamic_dims(tensor: torch.Tensor):
    """All dims, except the last one of activations: that is a width."""
    return list(range(tensor.dim() if not tensor.is_floating_point() else max(tensor.dim() - 1, 0)))


def _dims_beside_caches(tensors, caches):
    """The open dims: caches keep their number of sequences, and their sizes if they do not grow.

    One token is a decoding step, whose program serves one token alone.
    """
    state: dict[int, list[int]] = {id(t): [] for cache in caches for t in cache.state}
    for cache in caches:
        if cache.form.grows:
            state.update(zip(map(id, cache.state), open_dims(cache)))
    counters = {id(t) for cache in caches for t in cache.counter_sizes}
    batch = caches[0].sequences
    return [state[id(t)] if id(t) in state else [0] if id(t) in counters else
            [d for d in _dynamic_dims(t) if t.shape[d] != 1 and (d > 0 or t.shape[d] != batch)]
            for t in tensors]


def check_inputs(
    model: torch.nn.Module,
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raises unless there is a model with a tensor among its inputs."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected 'model' to be a torch.nn.Module or an ExportedProgram, found "
                        f"{type(model).__name__}")
    if not isinstance(args, tuple):
        raise TypeError(f"expected 'args' to be a tuple of the model's inputs, found "
                        f"{type(args).__name__}; write (x,) for one input")
    leaves = pytree.tree_leaves((args, dict(kwargs or {})))
    if not any(isinstance(x, torch.Tensor) for x in leaves):
        raise ValueError("expected at least one tensor among the inputs of the model, found none")


def _require_shapes(tensors, before) -> None:
    """Refuses a forward after which an input has another shape, of which torch makes no program."""
    for number, (tensor, shape) in enumerate(zip(tensors, before, strict=True)):
        # Two sizes may have become one in the meantime.
        given, found = ([str(size) for size in sizes] for sizes in (shape, tensor.shape))
        if given != found:
            raise TraceFailed(
                f"expected inputs that keep their shape, found [{', '.join(found)}] after the forward where "
                f"tensor {number} of the inputs had [{', '.join(given)}]; write y = x.unsqueeze(0) or the like "
                "instead of x.unsqueeze_(0)")


@dataclass
class Traced:
    """A model's program in core ATen, and what its outputs were."""

    program: torch.export.ExportedProgram
    returned_caches: dict = field(default_factory=dict)
    cache_changes: list[list[tuple[Path, Any]]] = field(default_factory=list)
    cache_results: list[int] = field(default_factory=list)

    @property
    def out_spec(self) -> pytree.TreeSpec:
        """The structure of the model's outputs, without the tensors that are made for caches."""
        spec = self.program.call_spec.out_spec
        return spec.child(0) if any(self.cache_results) else spec


class Example:
    """Example inputs of a model, as a trace takes them.

    Attributes:
        parts: positional and named inputs, with caches taken apart.
        leaves, spec: the same, flat.
        tensors: those among the leaves.
        dims: of each tensor the dims that stay open; None: none of any.
    """

    def __init__(self, model, args, kwargs, dynamic_tokens):
        check_inputs(model, args, kwargs)
        require_weights_in_memory(model, args, kwargs)
        self.parts = flatten_caches({**dict(enumerate(args)), **without_cache(model, args, kwargs)}, model)
        self.leaves, self.spec = pytree.tree_flatten((
            tuple(self.parts[i] for i in range(len(args))),
            {name: value for name, value in self.parts.items() if isinstance(name, str)}))
        self.tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]
        self.dims = self._open_dims() if dynamic_tokens else None

    def _open_dims(self):
        caches = caches_of(self.parts)
        return _dims_beside_caches(self.tensors, caches) if caches else \
            list(map(_dynamic_dims, self.tensors))


def trace(
    model: torch.nn.Module,
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None = None,
) -> torch.export.ExportedProgram:
    """The model's program for example inputs, in core ATen."""
    example = Example(model, args, kwargs, True)
    return trace_example(model, Inputs.of(model, example), example).program


def trace_example(
    model: torch.nn.Module, inputs: Inputs, example: Example, *, finish: Callable | None = None,
    routing: str = "moe",
) -> Traced:
    """The program of an example.

    Args:
        inputs: the model as a function of tensors.
        finish: changes what torch traced, by default to core ATen.
        routing: how routers of `moe_mlir.nn` run: by ops ("moe"), or by their meaning ("torch").
    """
    tensors = _without_aliases(example.tensors, model)
    # Sizes 0 and 1 are no special cases of the code that we write, so an
    # example with one token or one sequence still gives a dynamic dimension.
    oblivious = size_oblivious_export()
    outside = autocast_of(autocast_in_use(), enabled=False)
    with oblivious, torch.no_grad(), outside, hidden_gradients(), _routing_by(model, routing), \
            loops_as_ops(model), substitutions_as_ops(model), casts_without_effect(), explained():
        program = _trace_open(inputs, tensors, example.dims, finish or decompose)
    seen = inputs.seen
    return Traced(program, seen.returned_caches,
                  [_with_texts(changes) for changes in seen.cache_changes], seen.cache_results)


def _with_texts(changes):
    """Changes of a cache, with texts for open sizes."""
    return [(path, _size_text(value) if isinstance(value, torch.SymInt) else value)
            for path, value in changes]


def _size_text(size):
    text = format_size(size.node.expr)
    return text if isinstance(text, int) else SizeText(text)


def _without_aliases(tensors, model):
    """The tensors, cloned where an earlier one or a weight shows the same memory.

    Of one tensor at two places torch.export makes one input: a program that is
    right for such calls alone.
    """
    seen = {_memory(t) for t in (*model.parameters(), *model.buffers())}
    result = []
    for tensor in tensors:
        result.append(tensor.detach().clone() if _memory(tensor) in seen else tensor)
        seen.add(_memory(tensor))
    return result


def _memory(tensor):
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _trace(inputs, tensors, dims):
    """The program of example tensors whose dims `dims` stay open; None: all sizes are given."""
    shapes = None if dims is None else (tuple(
        {d: torch.export.Dim.AUTO for d in open_dims} for open_dims in dims),)
    with EinsumAsMatmul(), SqueezeAsksSizes():
        return torch.export.export(inputs, tuple(tensors), dynamic_shapes=shapes)


# What torch says where an open dim of size 1 has to be closed.
_WANTS_NUMBERS = ("must match the size of tensor", "must be bool, not SymBool")


def _trace_open(inputs, tensors, dims, finish):
    """The finished program with as many dims open as it can have.

    Open sizes of 0 are more than torch can do: it divides by them, or asks whether two are equal.
    """
    choices = [dims]
    if dims is not None and any(0 in tensor.shape for tensor in tensors):
        closed = [[d for d in open_dims if tensor.shape[d] != 0]
                  for tensor, open_dims in zip(tensors, dims)]
        choices += [closed, None] if closed != dims else [None]
    for choice in choices:
        try:
            return finish(_trace_with_open_ones(inputs, tensors, choice))
        except Exception as error:
            if choice is choices[-1]:
                raise
            _log.debug("cannot trace with sizes of 0 open: %s", error)


def _trace_with_open_ones(inputs, tensors, dims):
    """The program with as many dims open as it can have, but for those of size 0.

    An open dim is not broadcast, so that dims of size 1 may have to be closed,
    such as that of the heads in a mask for all heads; the first dim last, which
    counts sequences. Nor is a comparison of an open size with 1 a bool, as which
    transformers gives it to torch's attention where there is one token.
    """
    if dims is None:
        return _trace_as_it_is(inputs, tensors, dims)
    inside = [_with_other_sizes(t, open_dims, first=1) for t, open_dims in zip(tensors, dims)]
    none = [_with_other_sizes(t, open_dims, first=0) for t, open_dims in zip(tensors, dims)]
    choices = [dims, *([inside] if inside != dims else []), *([none] if none != inside else [])]
    for choice in choices:
        try:
            program, open_dims = _trace_of_several(inputs, tensors, choice)
            return _trace_as_it_is(inputs, tensors, open_dims) if program is None else program
        except (RuntimeError, TypeError) as error:
            if choice is choices[-1] or not any(text in str(error) for text in _WANTS_NUMBERS):
                raise
            _log.debug("cannot trace with all sizes of 1 open: %s", error)


def _with_other_sizes(tensor, dims, first):
    """Those of `dims` that are below `first` or have another size than 1."""
    return [d for d in dims if d < first or tensor.shape[d] != 1]


def _trace_as_it_is(inputs, tensors, dims):
    """The program of the example; dims that the model asks to have its size are closed."""
    program = _trace(inputs, tensors, dims)
    fixed = fixed_symbols(program) if dims is not None else set()
    if not fixed:
        return program
    return _trace(inputs, tensors, _without(dims, program, fixed))


def _without(dims, program, symbols):
    """The open dims whose sizes in the program are others than these symbols."""
    return [[d for d in open_dims
             if not (isinstance(shape[d], torch.SymInt) and shape[d].node.expr in symbols)]
            for open_dims, shape in zip(dims, input_shapes(program))]


def _trace_of_several(inputs, tensors, dims):
    """The program of an example with two sequences or tokens where the given one has one.

    Of sizes that are all 1 torch's matmul makes a program for these alone, and
    no guard says so. Dims that the model itself asks to be 1 are closed. None
    where nothing of the example has size 1, or two cannot be traced; with the
    dims that may be open in a program of the example.
    """
    known = dims
    while True:
        several = [_with_two(t, open_dims) for t, open_dims in zip(tensors, dims)]
        if all(a is b for a, b in zip(several, tensors)):
            return None, known
        try:
            program = _trace(inputs, several, dims)
        except Exception as error:  # the model's own code may refuse two, however it likes
            _log.debug("cannot trace two where the example has one: %s", error)
            return None, known
        refusing = symbols_refusing(program, tensors)
        if refusing is None:
            return None, known
        if not refusing:
            return program, dims
        # Up to the first question that the example answers otherwise, its own trace is the same:
        # the model asks it there, too.
        known = _without(known, program, {first_unequal_symbol(program, tensors)})
        closed = _without(dims, program, refusing)
        if closed == dims:
            return None, known
        dims = closed


def _with_two(tensor, dims):
    """The tensor itself, or twice along those of `dims` that have size 1."""
    counts = [2 if d in dims and size == 1 else 1 for d, size in enumerate(tensor.shape)]
    return tensor.repeat(counts) if 2 in counts else tensor


def export(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] | None = None,
    *,
    dynamic_tokens: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> Module:
    """Imports a model as MLIR: moe ops for its routers, linalg for the rest.

    Args:
        model: a torch.nn.Module, or an ExportedProgram (then without args).
        args: example inputs, as a tuple.
        dynamic_tokens: keep batch and token dimensions dynamic. Those are all dimensions of an
            integer input, since `[batch, tokens]` of token ids cannot be told from `[tokens, k]`
            of chosen experts, and all but the last of any other. Some GPU kernels need a static
            k: let the model choose the experts, or pass a program that torch.export made with
            your own `dynamic_shapes`.
        kwargs: example keyword inputs; those that are not tensors are constants.

    Raises:
        ImportFailed: every unsupported operation, with its lines.
        TraceFailed: torch.export cannot trace the model.
    """
    return _export(model, args, dynamic_tokens, kwargs)


def export_packed(program: torch.export.ExportedProgram, cpu: str) -> Module:
    """`export` of a program whose weights are packed in place for a CPU, by LLVM's name."""
    return _export(program, None, True, None, cpu)


def _export(model, args, dynamic_tokens, kwargs, packed_for="") -> Module:
    if isinstance(model, torch.export.ExportedProgram):
        traced = Traced(decompose(model))
        leaves = _leaves_of(traced.program)
        return _module(_import(traced, None, {}, bounds_of(model), packed_for), None,
                       model.call_spec.in_spec, leaves)
    example = Example(model, args, kwargs, dynamic_tokens)
    stored = StoredTraces(model, example.parts, example.tensors, example.dims)
    found = stored.find()
    if found is None:
        # The caller gave no bounds; those that torch derives while it traces (0 and 1 are sizes
        # of their own to it) say nothing about the model.
        found = _import(trace_example(model, Inputs.of(model, example), example), model,
                        input_names(model, example.spec, example.leaves), [], packed_for)
        stored.add(found)
    else:
        for part, changes in zip(caches_of(example.parts), found.cache_changes):
            learn(part.cache, changes, [], part)
    warn_without_cache(model, args, kwargs)
    return _module(found, model, example.spec, example.leaves)


def _import(traced, owner, names, bounds, packed_for) -> TracedModule:
    """The IR of a program; `names` are those that users know of its inputs."""
    program = traced.program
    raise_routing(program.graph_module)
    raise_plain_attention(program.graph)
    raise_sink_attention(program.graph)
    raise_experts(program.graph)
    raise_sorted_ids(program.graph)
    if packed_for:
        pack_weights(program, packed_for)
    pack_grouped_heads(program.graph)
    noted = count_noted(program)
    with size_oblivious_export():
        decompose_missing(program)
    # Torch's decompositions may choose by sizes, as a model's code does.
    decomposed = conditions_noted_since(program, noted)
    imported = import_program(program, label=lambda name: names.get(name, _plain(name)))
    asked = [*conditions(program), *decomposed, *bounds]
    known = [c for c in asked if set(names_in(c[0])) <= set(imported.symbols)]
    state = _state(program)
    own = [name for name in state if owner is not None and is_of_model(owner, name)]
    return TracedModule(
        imported, own, {name: tensor for name, tensor in state.items() if name not in own},
        traced.out_spec, traced.returned_caches, traced.cache_changes, traced.cache_results,
        [*known, *imported.conditions], [] if owner is None else _misread(program, owner))


def _module(traced: TracedModule, owner, spec, leaves) -> Module:
    """A trace as a module of a model, or of none, for its example."""
    constants = {i: x for i, x in enumerate(leaves) if not isinstance(x, torch.Tensor)}
    weights = ModelWeights(owner, {**dict.fromkeys(traced.names), **traced.constants})
    return Module(traced.program, weights, spec, traced.out_spec, constants, traced.returned_caches,
                  traced.cache_changes, traced.cache_results, traced.conditions, traced.misread, owner)


def _misread(program, model) -> list[str]:
    """The names of weights in panels that something else than ops of ours reads."""
    names = program.graph_signature.inputs_to_parameters
    weights = dict(model.named_parameters(remove_duplicate=False))
    found = ((_plain(names[node.name]), node) for node in program.graph.nodes if node.name in names)
    return [name for name, node in found if isinstance(weights.get(name), Panels)
            and not all(str(user.target).startswith("moe.") for user in node.users)]


def _leaves_of(program) -> list:
    """The inputs that a program was exported with: its fake tensors, and constants."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes
              if node.op == "placeholder"}
    specs = program.graph_signature.input_specs
    return [spec.arg.value if isinstance(spec.arg, ConstantArgument) else values[spec.arg.name]
            for spec in specs if spec.kind is InputKind.USER_INPUT]


def _state(program) -> dict:
    """The program's parameters, buffers and constants by the names that users know."""
    tensors = {**program.constants, **program.state_dict}
    return {_plain(n): t for n, t in tensors.items() if isinstance(t, torch.Tensor)}


def _plain(name: str) -> str:
    return name.removeprefix(_PREFIX)


def input_names(model, spec, leaves) -> dict:
    """torch's names of the flat tensor inputs -> the forward's parameter names."""
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        bound = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except TypeError:
        return {}
    names: dict[str, str] = {}
    for path, leaf in pytree.tree_flatten_with_path(bound)[0]:
        if isinstance(leaf, torch.Tensor):
            text = ".".join(str(getattr(part, name)) for part in path
                            for name in ("key", "idx", "name") if hasattr(part, name))
            names[f"tensors_{len(names)}"] = text.removeprefix("kwargs.")
    return names
