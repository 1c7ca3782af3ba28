"""Stores weights once in the order in which the kernels read them.

    moe_mlir.pack_experts(model)      # in place: one copy of each weight, never two
    moe_mlir.pack_linears(model)      # torch.nn.Linear, too
    moe_mlir.unpack_experts(model)    # back, to train or to change weights
    moe_mlir.unpack_linears(model)

A packed layer of experts gives identical results, and is faster if few tokens share
an expert; a packed linear layer runs moe.packed_linear instead of torch's product.
Packed weights are parameters in panels (`ops/_panels.py`) without gradients;
`state_dict` and `load_state_dict` keep the shapes of the model.
"""

from collections import Counter
from typing import NamedTuple

import torch

from ._expert_forms import activation_of, keep_activation
from ._log import warn_user
from ._modules import require_module
from .nn import MoELayer
from .nn.soft import SoftMoE
from .ops._check import ACTIVATIONS
from .ops._expert_activation import ExpertActivation
from .ops._panels import (
    columns_of_panels,
    is_packed,
    pack_weight,
    relaid,
    steps_of,
    unpack_weight,
)
from .ops.packed_linear import packed_linear

# Modules that read the weights of the linear layers in them: torch's, and those that `hf.patch`
# gives another forward.
_READERS = {"TransformerEncoderLayer", "SwitchTransformersExperts"}
# What a module holds of the weights that are packed, by name; empty after `unpack_experts`.
_FORMS = "_moe_packed_weights"


class _Form(NamedTuple):
    """A weight as it was before it was packed."""

    shape: tuple[int, ...]
    transposed: bool
    halves: bool
    required_grad: bool
    steps: int      # of `in` side by side, as its dtype had them

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.mT if self.transposed else weight
        # A matrix alone is that of one expert.
        return pack_weight(weight.view(-1, *weight.shape[-2:]), halves=self.halves)

    def unpack(self, panels: torch.Tensor) -> torch.Tensor:
        *_, out, width = self.shape
        if self.transposed:
            out, width = width, out
        # `module.to(dtype)` leaves the order as it is.
        weight = unpack_weight(relaid(panels, self.steps), out, width)
        return (weight.mT.contiguous() if self.transposed else weight).view(self.shape)


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
    shared = _shared(model)
    packed = 0
    for name, module in model.named_modules():
        if not _is_layer(module) or getattr(module, _FORMS, None):
            continue
        if reason := _why_not(module, shared):
            warn_user(f"'{name}' ({type(module).__name__}) is not packed: {reason}")
            continue
        _pack(module)
        packed += 1
    return packed


def unpack_experts(model: torch.nn.Module) -> int:
    """Undoes `pack_experts`; returns the number of layers."""
    require_module(model)
    layers = [module for module in model.modules()
              if not isinstance(module, PackedLinear) and getattr(module, _FORMS, None)]
    for module in layers:
        _unpack_weights(module)
        keep_activation(module, None)
    return len(layers)


class PackedLinear(torch.nn.Linear):
    """A linear layer with its weight in panels; `pack_linears` turns a torch.nn.Linear into it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # torch.func.functional_call gives the weights of a state dict, which are not packed.
        if not is_packed(self.weight):
            return super().forward(input)
        return packed_linear(input, self.weight, self.bias, self.out_features)

    def reset_parameters(self) -> None:
        raise RuntimeError("expected a weight that is not packed, found panels; call "
                           "moe_mlir.unpack_linears(model) before it is initialised")

    def _apply(self, fn, recurse=True):
        forms = getattr(self, _FORMS)
        super()._apply(fn, recurse)
        form, steps = forms["weight"], steps_of(self.weight.dtype)
        if form.steps != steps:
            weight = relaid(self.weight.detach(), form.steps)
            self.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
            setattr(self, _FORMS, {"weight": form._replace(steps=steps)})
        return self


def pack_linears(model: torch.nn.Module) -> int:
    """Packs the weights of all linear layers of a model, in place.

    Packed weights are faster to read, which counts in decoding. Results can differ from torch's
    in rounding. Code that reads the weight of a packed layer, instead of calling the layer, sees
    the panels.

    Args:
        model: any module. Layers of type `torch.nn.Linear` are packed, not those of derived
            classes. Routers, whose names contain "router" or end in "gate", keep their weights,
            so that they are still recognised; so do layers with fewer outputs than a panel has
            columns (16 or 64).

    Returns:
        the number of layers packed. A layer that cannot be packed, for example one that shares
        its weight with the embedding, gets a warning with the reason.

    Memory: at most one weight more than the model, while it is packed; widths that are not a
    multiple of 64 are padded with zeros.
    """
    require_module(model)
    shared, read = _shared(model), _read_by_parents(model)
    packed = 0
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or _is_of_router(name) or \
                module.out_features < columns_of_panels() or module.in_features == 0:
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
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
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


def _why_not(module, shared) -> str:
    """Why the weights of a layer must lie as they do; empty if they can be packed."""
    weights = [getattr(module, name) for name in _weights(module)]
    if type(module) is MoELayer:
        if isinstance(module.router, SoftMoE):
            return "a soft router uses its weights in other products"
    else:
        implementation = module.config._experts_implementation
        if implementation != "moe":
            return (f"expected the experts implementation 'moe', found {implementation!r}; call "
                    "model.set_experts_implementation('moe')")
        if module.has_post_expert_norm:
            return "its experts end with a norm, which runs between products"
    if reason := _why_not_weights(module, weights, shared):
        return reason
    activation = _activation(module)
    if activation is None:
        return "expected an activation that kernels know"
    hidden = weights[1].shape[1 if getattr(module, "is_transposed", False) else 2]
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
    if module.in_features % 2 and module.weight.dtype == torch.bfloat16:
        return f"expected an even number of features in bfloat16, found {module.in_features}"
    return ""


def _why_not_weights(module, weights, shared) -> str:
    """What keeps weights of any layer from being packed."""
    if any(type(w) is not torch.nn.Parameter or w.is_meta for w in weights) or \
            "_hf_hook" in vars(module):
        return "expected its weights in memory as plain parameters; pack before they are spread"
    if any(w.dtype not in ACTIVATIONS for w in weights):
        return f"expected float32, bfloat16 or float16, found {weights[0].dtype}"
    if any(id(w) in shared for w in weights):
        return "its weights belong to other modules too"
    return ""


def _is_of_router(name: str) -> bool:
    """Whether a module is a router's, or a part of one, by the names of transformers."""
    return any("router" in part or part.endswith("gate") for part in name.split("."))


# ---- packing -----------------------------------------------------------------------


def _pack(module):
    activation = _activation(module)
    gates = zip(_weights(module), (activation.gate, "none"))
    _pack_weights(module, gates, getattr(module, "is_transposed", False))
    keep_activation(module, activation)


def _pack_weights(module, gates, transposed):
    """Packs the weights of these names; those with a concatenated gate by halves."""
    is_new, forms = not hasattr(module, _FORMS), {}
    for name, gate in gates:
        weight = getattr(module, name)
        form = _Form(tuple(weight.shape), transposed, gate == "concatenated", weight.requires_grad,
                     steps_of(weight.dtype))
        panels = form.pack(weight.detach())
        setattr(module, name, torch.nn.Parameter(panels, requires_grad=False))
        forms[name] = form
    setattr(module, _FORMS, forms)
    if is_new:
        module.register_state_dict_post_hook(_unpack_state)
        module.register_load_state_dict_pre_hook(_pack_state)


def _unpack_weights(module):
    for name, form in getattr(module, _FORMS).items():
        weight = form.unpack(getattr(module, name).detach())
        setattr(module, name, torch.nn.Parameter(weight, form.required_grad))
    setattr(module, _FORMS, {})


def _unpack_state(module, state, prefix, metadata):
    for name, form in getattr(module, _FORMS).items():
        if prefix + name in state:
            state[prefix + name] = form.unpack(state[prefix + name].detach())


def _pack_state(module, state, prefix, *_):
    for name, form in getattr(module, _FORMS).items():
        weight = state.get(prefix + name)
        # torch tells of any other shape.
        if weight is not None and tuple(weight.shape) == form.shape:
            state[prefix + name] = form.pack(weight.detach().to(getattr(module, name).dtype))


__all__ = ["pack_experts", "pack_linears", "unpack_experts", "unpack_linears"]
