"""Which layers of a model have weights that may be stored in another order, or rounded."""

from collections import Counter
from collections.abc import Collection

import torch

from .._transformers.names import has_post_expert_norm
from ..experts.activation_detection import activation_of
from ..experts.packed_weight import Panels, is_shared_memory
from ..nn import MoELayer
from ..nn.soft import SoftMoE
from ..ops._check import ACTIVATIONS
from ..ops._expert_activation import ExpertActivation

# Modules that read the weights of the layers in them: torch's, those that `hf.patch` gives another
# forward, and PEFT's adapters of experts, which put a parametrization around a weight.
_READERS = {"TransformerEncoderLayer", "SwitchTransformersExperts", "ParamWrapper"}
# PEFT's modules around a layer, and what the layer itself is in them; the rest is trained.
_ADAPTERS = {"BaseTunerLayer": "base_layer", "AuxiliaryTrainingWrapper": "original_module"}
# Why a layer stays as it is by design.
OF_ROUTER = "it is a router's, which stays recognised"
TRAINED = "PEFT trains it"


class ModelLayers:
    """The layers of a model: what they are, and why their weights must stay as they are."""

    def __init__(self, model: torch.nn.Module) -> None:
        owners = [(id(p), module) for module in model.modules()
                  for p in module.parameters(recurse=False)]
        counts = Counter(number for number, _ in owners)
        # Parameters that more than one module has.
        self._shared = {number for number, count in counts.items() if count > 1}
        # Those that are an embedding and one other module's: the weight of a tied head.
        self._of_embedding = {number for number, module in owners
                              if counts[number] == 2 and isinstance(module, torch.nn.Embedding)}
        # Layers whose weights another module gives to a fused op itself.
        self._read = {
            id(layer) for module in model.modules()
            if _is_a(module, _READERS)
            for layer in module.modules()}
        self._wrapped = {
            id(layer) for module in model.modules() if _is_a(module, {"ParamWrapper"})
            for layer in module.modules()}
        self._trained_by_peft = {
            id(part) for module in model.modules() for name, part in module.named_modules()
            if name and any(_is_a(module, {kind}) and name.split(".")[0] != layer
                            for kind, layer in _ADAPTERS.items())}

    def why_not_experts(self, module: torch.nn.Module, *, any_implementation: bool = False) -> str:
        """Why the weights of a layer of experts must lie as they do; empty if they may change."""
        if type(module) is not MoELayer and not any_implementation:
            implementation = module.config._experts_implementation
            if implementation != "moe":
                return (f"expected the experts implementation 'moe', found {implementation!r}; "
                        "call model.set_experts_implementation('moe')")
        return (self.why_no_kernel(module)
                or self._why_not_weights(module, weight_names(module)))

    def why_no_kernel(self, module: torch.nn.Module) -> str:
        """Why no kernel computes a layer of experts, whatever its weights are; empty if one does."""
        if self.is_read_elsewhere(module):
            return self._why_read_elsewhere(module, "weights")
        if isinstance(getattr(module, "router", None), SoftMoE):
            return "a soft router uses its weights in other products"
        if type(module) is not MoELayer and has_post_expert_norm(module):
            return "its experts end with a norm, which runs between products"
        return "" if layer_activation(module) else "expected an activation that kernels know"

    def is_read_elsewhere(self, module: torch.nn.Module) -> bool:
        """Whether a module around a layer reads its weights without calling it."""
        return id(module) in self._read

    def _why_read_elsewhere(self, module, weights) -> str:
        if id(module) in self._wrapped:
            return (f"an adapter of PEFT adds to its {weights} in each call (target_parameters); "
                    "call model.merge_and_unload() before")
        return f"a module around it reads its {weights} without calling it"

    def is_trained_by_peft(self, module: torch.nn.Module) -> bool:
        """Whether a layer is an adapter, or a copy of a layer that PEFT trains."""
        return id(module) in self._trained_by_peft

    def why_not_linear(self, module: torch.nn.Module, *, may_be_tied: bool = False) -> str:
        """The same of a linear layer; `may_be_tied`: its weight may be an embedding's, too."""
        if self.is_read_elsewhere(module):
            return self._why_read_elsewhere(module, "weight")
        return self._why_not_weights(module, ["weight"],
                                     self._of_embedding if may_be_tied else set())

    def is_tied(self, module: torch.nn.Module) -> bool:
        """Whether the weight of a linear layer is an embedding's, too."""
        return id(module.weight) in self._of_embedding

    def _why_not_weights(self, module, names, may_be_shared=frozenset()) -> str:
        weights = [getattr(module, name) for name in names]
        weights = [w for w in weights if not isinstance(w, Panels)]
        if any(type(w) is not torch.nn.Parameter or w.is_meta for w in weights) or \
                "_hf_hook" in vars(module):
            return ("expected its weights in memory as plain parameters; change them before they "
                    "are spread")
        if any(w.dtype not in ACTIVATIONS for w in weights):
            return f"expected float32, bfloat16 or float16, found {weights[0].dtype}"
        if any(id(w) in self._shared - may_be_shared for w in weights):
            return "its weights belong to other modules too"
        if any(is_shared_memory(w) for w in weights):
            return ("other tensors have the memory of its weights: a tied weight, or a value of "
                    "state_dict() or .data that is still held")
        return ""


def _is_a(module, names: Collection[str]) -> bool:
    """By the names of its classes: what is not imported need not be installed."""
    return any(base.__name__ in names for base in type(module).__mro__)


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module is a layer of experts."""
    return type(module) is MoELayer or _is_transformers_layer(module)


def _is_transformers_layer(module) -> bool:
    """Whether it is what `use_experts_implementation` decorates."""
    return (all(hasattr(module, name) for name in ("has_gate", "is_transposed", "down_proj"))
            and hasattr(getattr(module, "config", None), "_experts_implementation"))


def weight_names(module: torch.nn.Module) -> tuple[str, str]:
    """The names of the two weights of a layer of experts."""
    if type(module) is MoELayer:
        return "w_in", "w_out"
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def layer_activation(module: torch.nn.Module) -> ExpertActivation | None:
    """What the layer does between its weights; None if that is not known."""
    return module.activation if type(module) is MoELayer else activation_of(module)


def is_of_router(name: str) -> bool:
    """Whether a module is a router's, or a part of one, by the names of transformers."""
    return any("router" in part or part.endswith("gate") for part in name.split("."))
