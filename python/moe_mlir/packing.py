"""Stores weights once in the order in which the kernels read them.

    moe_mlir.pack_experts(model)      # in place: one copy of each weight, never two
    moe_mlir.pack_linears(model)      # torch.nn.Linear, too
    moe_mlir.unpack_experts(model)    # back, to train or to change weights
    moe_mlir.unpack_linears(model)

A packed layer of experts gives identical results, and is faster if few tokens share
an expert; a packed linear layer runs moe.packed_linear instead of torch's product.
Packed weights are the same parameters, in panels (`ops/_panels.py`) and without gradients.
All but the kernels still see the weights of the model (`experts/packed_weight.py`).
"""

from collections import Counter

import torch

from ._support.log import warn_user
from ._support.modules import require_module
from ._transformers.names import has_post_expert_norm
from .experts.activation_detection import activation_of, keep_activation
from .experts.packed_weight import (
    Panels,
    is_shared_memory,
    live_copy,
    pack_parameter,
    packed_state,
    panels_of,
    unpack_parameter,
)
from .nn import MoELayer
from .nn.soft import SoftMoE
from .ops._check import ACTIVATIONS
from .ops._expert_activation import ExpertActivation
from .ops._panels import columns_of_panels, is_packed
from .ops.packed_linear import packed_linear

# Modules that read the weights of the layers in them: torch's, those that `hf.patch` gives another
# forward, and PEFT's adapters of experts, which put a parametrization around a weight.
_READERS = {"TransformerEncoderLayer", "SwitchTransformersExperts", "ParamWrapper"}
# That a module's state dict has its weights as they were before they were packed.
_HAS_HOOKS = "_moe_has_packing_hooks"


def pack_experts(model: torch.nn.Module) -> int:
    """Packs the weights of all layers of experts of a model, in place.

    Args:
        model: any module. Layers of experts are `nn.MoELayer` and those of transformers models
            whose experts implementation is "moe" (`model.set_experts_implementation("moe")`).

    Returns:
        the number of newly packed layers. If a layer cannot be packed, a warning gives the
        reason.

    Packing needs memory for one additional weight of one layer. Widths that are not multiples
    of 64 are padded with zeros.
    """
    require_module(model)
    shared, read = _shared(model), _read_by_parents(model)
    packed = 0
    for name, module in model.named_modules():
        if not _is_layer(module) or not _unpacked(module, _weights(module)):
            continue
        if reason := _why_not(module, shared, read):
            warn_user(f"'{name}' ({type(module).__name__}) is not packed: {reason}")
            continue
        _pack(module)
        packed += 1
    return packed


def unpack_experts(model: torch.nn.Module) -> int:
    """Undoes `pack_experts`; returns the number of layers."""
    require_module(model)
    layers = [module for module in model.modules() if _packed(module) and _is_layer(module)]
    for module in layers:
        _unpack_weights(module)
        keep_activation(module, None)
    return len(layers)


class PackedLinear(torch.nn.Linear):
    """A linear layer with its weight in panels; `pack_linears` turns a torch.nn.Linear into it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = panels_of(self.weight)
        # torch.func.functional_call gives the weights of a state dict, which are not packed.
        if not is_packed(weight):
            return super().forward(input)
        return packed_linear(input, weight, self.bias, self.out_features)

    def reset_parameters(self) -> None:
        raise RuntimeError("expected a weight that is not packed, found panels; call "
                           "moe_mlir.unpack_linears(model) before it is initialised")


def pack_linears(model: torch.nn.Module) -> int:
    """Packs the weights of all linear layers of a model, in place.

    Packed weights are faster to read, which counts in decoding. Results can differ from torch's
    in rounding. Code that reads or writes the weight of a packed layer, instead of calling the
    layer, sees the weight as it was, at the cost of unpacking it; its `shape` is that of the panels.

    Args:
        model: any module. Layers of type `torch.nn.Linear` are packed, not those of derived
            classes. Routers, whose names contain "router" or end in "gate", keep their weights,
            so that they are still recognised.

    Returns:
        the number of layers packed. A layer that cannot be packed gets a warning with the reason:
        it has fewer outputs than a panel has columns on this CPU (16 or 64), or shares its weight
        with the embedding, for example.

    Memory: at most one weight more than the model, while it is packed; widths that are not a
    multiple of 64 are padded with zeros.
    """
    require_module(model)
    shared, read = _shared(model), _read_by_parents(model)
    packed = 0
    for name, module in model.named_modules():
        if type(module) not in (torch.nn.Linear, PackedLinear) or _is_of_router(name) or \
                module.in_features == 0 or not _unpacked(module, ["weight"]):
            continue
        if reason := _why_not_linear(module, shared, read):
            warn_user(f"'{name}' ({type(module).__name__}) is not packed: {reason}")
            continue
        _pack_weights(module, [("weight", "none")], transposed=False)
        module.__class__ = PackedLinear
        packed += 1
    return packed


def unpack_linears(model: torch.nn.Module) -> int:
    """Gives the layers that `pack_linears` packed their weights back; returns their number."""
    require_module(model)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)
              or (type(module) is torch.nn.Linear and _packed(module))]
    for module in layers:
        _unpack_weights(module)
        module.__class__ = torch.nn.Linear
    return len(layers)


# ---- which layers ------------------------------------------------------------------


def _is_layer(module) -> bool:
    return type(module) is MoELayer or _is_transformers_layer(module)


def _is_transformers_layer(module) -> bool:
    """Whether it is what `use_experts_implementation` decorates."""
    return (all(hasattr(module, name) for name in ("has_gate", "is_transposed", "down_proj"))
            and hasattr(getattr(module, "config", None), "_experts_implementation"))


def _weights(module) -> tuple[str, str]:
    if type(module) is MoELayer:
        return "w_in", "w_out"
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _shared(model) -> set[int]:
    """Parameters that more than one module has."""
    counts = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {number for number, count in counts.items() if count > 1}


def _activation(module):
    """What the layer does between its weights; None if that is not known."""
    return ExpertActivation("gelu") if type(module) is MoELayer else activation_of(module)


def _why_not(module, shared, read) -> str:
    """Why the weights of a layer must lie as they do; empty if they can be packed."""
    if id(module) in read:
        return "a module around it reads its weights without calling it"
    weights = [getattr(module, name) for name in _weights(module)]
    if type(module) is MoELayer:
        if isinstance(module.router, SoftMoE):
            return "a soft router uses its weights in other products"
    else:
        implementation = module.config._experts_implementation
        if implementation != "moe":
            return (f"expected the experts implementation 'moe', found {implementation!r}; call "
                    "model.set_experts_implementation('moe')")
        if has_post_expert_norm(module):
            return "its experts end with a norm, which runs between products"
    if reason := _why_not_weights(module, weights, shared):
        return reason
    activation = _activation(module)
    if activation is None:
        return "expected an activation that kernels know"
    last = weights[1]
    shape = last.form.shape if isinstance(last, Panels) else last.shape
    hidden = shape[1 if getattr(module, "is_transposed", False) else 2]
    if hidden % 2 and weights[1].dtype == torch.bfloat16:
        return f"expected an even number of hidden features in bfloat16, found {hidden}"
    return ""


def _read_by_parents(model) -> set[int]:
    """Layers whose weights another module gives to a fused op itself."""
    return {id(layer) for module in model.modules()
            if any(base.__name__ in _READERS for base in type(module).__mro__)
            for layer in module.modules()}


def _why_not_linear(module, shared, read) -> str:
    if id(module) in read:
        return "a module around it reads its weight without calling it"
    if reason := _why_not_weights(module, [module.weight], shared):
        return reason
    if module.out_features < columns_of_panels():
        return (f"expected as many outputs as a panel has columns on this CPU, "
                f"{columns_of_panels()}, found {module.out_features}")
    if module.in_features % 2 and module.weight.dtype == torch.bfloat16:
        return f"expected an even number of features in bfloat16, found {module.in_features}"
    return ""


def _why_not_weights(module, weights, shared) -> str:
    """What keeps weights of any layer from being packed."""
    weights = [w for w in weights if not isinstance(w, Panels)]
    if any(type(w) is not torch.nn.Parameter or w.is_meta for w in weights) or \
            "_hf_hook" in vars(module):
        return "expected its weights in memory as plain parameters; pack before they are spread"
    if any(w.dtype not in ACTIVATIONS for w in weights):
        return f"expected float32, bfloat16 or float16, found {weights[0].dtype}"
    if any(id(w) in shared for w in weights):
        return "its weights belong to other modules too"
    if any(is_shared_memory(w) for w in weights):
        return ("other tensors have the memory of its weights: a tied weight, or a value of "
                "state_dict() or .data that is still held")
    return ""


def _is_of_router(name: str) -> bool:
    """Whether a module is a router's, or a part of one, by the names of transformers."""
    return any("router" in part or part.endswith("gate") for part in name.split("."))


# ---- packing -----------------------------------------------------------------------


def _pack(module):
    activation = _activation(module)
    gates = zip(_weights(module), (activation.gate, "none"))
    keep_activation(module, activation)
    _pack_weights(module, gates, getattr(module, "is_transposed", False))


def _pack_weights(module, gates, transposed):
    """Packs the weights of these names; those with a concatenated gate by halves.

    An exception between them leaves some packed, with which the layer refuses to run; to pack
    or to unpack again goes on from there.
    """
    if not getattr(module, _HAS_HOOKS, False):
        module.register_state_dict_post_hook(_unpack_state)
        module.register_load_state_dict_pre_hook(_pack_state)
        setattr(module, _HAS_HOOKS, True)
    for name, gate in gates:
        weight = getattr(module, name)
        if not isinstance(weight, Panels):
            pack_parameter(weight, transposed=transposed, halves=gate == "concatenated")


def _unpack_weights(module):
    for weight in _packed(module).values():
        unpack_parameter(weight)


def _packed(module) -> dict[str, Panels]:
    """The packed weights that a module has itself, by name."""
    return {n: w for n, w in module._parameters.items() if isinstance(w, Panels)}


def _unpacked(module, names) -> list[str]:
    """Those of the names whose weights are to be packed."""
    return [name for name in names if not isinstance(getattr(module, name), Panels)]


def _unpack_state(module, state, prefix, metadata):
    for name, weight in _packed(module).items():
        if prefix + name in state:
            state[prefix + name] = live_copy(weight)


def _pack_state(module, state, prefix, *_):
    for name, weight in _packed(module).items():
        value = state.get(prefix + name)
        # torch tells of any other shape.
        if value is not None and tuple(value.shape) == weight.form.shape:
            state[prefix + name] = packed_state(weight, value)


__all__ = ["pack_experts", "pack_linears", "unpack_experts", "unpack_linears"]
