"""Stores weights once in the order in which the kernels read them.

    moe_mlir.pack_experts(model)      # in place: one copy of each weight, never two
    moe_mlir.pack_linears(model)      # torch.nn.Linear, too
    moe_mlir.unpack_experts(model)    # back, to train or to change weights
    moe_mlir.unpack_linears(model)

A packed layer of experts gives identical results, and is faster if few tokens share
an expert; a packed linear layer runs moe.packed_linear instead of torch's product.
Packed weights are the same parameters, in panels (`ops/_panels.py`) and without gradients.
All but the kernels still see the weights of the model (`experts/packed_weight.py`).
`moe_mlir.compile` packs both by `lend`, until they are trained (`experts/loan.py`).
"""


import torch

from ._support.changes import Changes, Tally
from ._support.log import logger, warn_user
from ._support.modules import require_module
from ._transformers.grouped_linear import groups_of
from .experts.activation_detection import keep_activation
from .experts.loan import Loan
from .experts.packed_weight import (
    PackedWeight,
    Panels,
    live_copy,
    operand_of,
    pack_parameter,
    packed_state,
    unpack_parameter,
)
from .experts.quantized_weight import QuantizedWeight
from .ops._panels import columns_of_panels, is_packed, why_no_panels
from .ops.packed_linear import packed_linear
from .weights.implementations import run_by_kernels
from .weights.model_layers import (
    OF_ROUTER,
    TRAINED,
    ModelLayers,
    is_experts,
    is_of_router,
    layer_activation,
    weight_names,
)

_log = logger("compile")
# That a module's state dict has its weights as they were before they were packed.
_HAS_HOOKS = "_moe_has_packing_hooks"


def pack_experts(model: torch.nn.Module) -> Changes:
    """Packs the weights of all layers of experts of a model, in place.

    Args:
        model: any module. Layers of experts are `nn.MoELayer` and those of transformers models
            whose experts implementation is "moe" (`model.set_experts_implementation("moe")`).

    Returns:
        the number of newly packed layers, a `Changes`: its `summary()` lists them, and those
        that stay as they are with the reason. If a layer cannot be packed, a warning gives the
        reason as well.

    Packing needs memory for one additional weight of one layer. Widths that are not multiples
    of 64 are padded with zeros.
    """
    require_module(model)
    tally = Tally("packed", warn_user)
    _pack_experts(model, tally)
    return tally.changes()


def unpack_experts(model: torch.nn.Module) -> int:
    """Undoes `pack_experts`; returns the number of layers."""
    require_module(model)
    layers = [module for module in model.modules() if _packed(module) and is_experts(module)]
    for module in layers:
        _unpack_weights(module)
        keep_activation(module, None)
    return len(layers)


class PackedLinear(torch.nn.Linear):
    """A linear layer with its weight in panels; `pack_linears` turns a torch.nn.Linear into it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = operand_of(self.weight)
        # torch.func.functional_call gives the weights of a state dict, which are not packed.
        if not is_packed(weight):
            return super().forward(input)
        return packed_linear(input, weight, self.bias, self.out_features)

    def reset_parameters(self) -> None:
        give_back(self)
        if not isinstance(self, PackedLinear):
            self.reset_parameters()
            return
        raise RuntimeError("expected a weight that is not packed, found panels; call "
                           "moe_mlir.unpack_linears(model) before it is initialised")


class PackedGroupedLinear(PackedLinear):
    """A layer whose weight is a matrix for each group of features, packed by `pack_linears`."""

    # What the layer is without panels.
    packed_class: type[torch.nn.Linear]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = operand_of(self.weight)
        if not is_packed(weight):
            return self.packed_class.forward(self, input)
        # Each group has whole panels.
        groups = self.n_groups
        return packed_linear(input, weight, None, self.out_features // groups, groups)


def pack_linears(model: torch.nn.Module) -> Changes:
    """Packs the weights of all linear layers of a model, in place.

    Packed weights are faster to read, which counts in decoding. Results can differ from torch's
    in rounding. Code that reads or writes the weight of a packed layer, instead of calling the
    layer, sees the weight as it was, at the cost of unpacking it; its `shape` is that of the panels.

    Args:
        model: any module. Layers of type `torch.nn.Linear` are packed, and DeepSeek-V4's
            projections by groups, not those of other derived classes. Routers, whose names contain "router" or end in "gate", keep their weights,
            so that they are still recognised, and so do PEFT's adapters, so that they can be trained.

    Returns:
        the number of layers packed, a `Changes`: its `summary()` lists them, and those that
        stay as they are. A layer that cannot be packed gets a warning with the reason:
        it has fewer outputs than a panel has columns on this CPU (16 or 64), or shares its weight
        with the embedding, for example.

    Memory: at most one weight more than the model, while it is packed; widths that are not a
    multiple of 64 are padded with zeros.
    """
    require_module(model)
    tally = Tally("packed", warn_user)
    _pack_linears(model, tally)
    return tally.changes()


def unpack_linears(model: torch.nn.Module) -> int:
    """Gives the layers that `pack_linears` packed their weights back; returns their number."""
    require_module(model)
    # An exception may have left a weight packed whose layer is not.
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)
              or (groups_of(module) > 0 and _packed(module))]
    for module in layers:
        _unpack_weights(module)
        _restore_class(module)
    return len(layers)


# ---- by moe_mlir.compile -----------------------------------------------------------


def lend(model: torch.nn.Module) -> dict[str, PackedWeight]:
    """Packs what it can of a model in evaluation mode on the CPU, until it is trained.

    What stays as it is, and why, is in the log. An exception leaves the model as it was.

    Returns:
        what `lent` does.
    """
    if not model.training and all(weight.device.type == "cpu" for weight in model.parameters()):
        loan = Loan(unpack_parameter)
        try:
            tally = Tally("packed", _log.info)
            _pack_experts(model, tally, loan)
            _pack_linears(model, tally, loan)
        except BaseException:
            loan.give_back()
            raise
        _log.info("%s: %d layers are packed", type(model).__name__, tally.changes())
    return lent(model)


def lent(model: torch.nn.Module) -> dict[str, PackedWeight]:
    """The weights that `lend` packed, by name."""
    return {name: weight for name, weight in model.named_parameters()
            if isinstance(weight, PackedWeight) and weight.loan is not None}


def give_back(model: torch.nn.Module) -> None:
    """Undoes `lend`."""
    for weight in lent(model).values():
        _unpack(weight)
    for module in model.modules():
        if isinstance(module, PackedLinear) and not _packed(module):
            _restore_class(module)


# ---- which layers ------------------------------------------------------------------


def _why_not(layers: ModelLayers, module, any_implementation: bool) -> str:
    """Why the weights of a layer cannot be packed; empty if they can."""
    if reason := layers.why_not_experts(module, any_implementation=any_implementation):
        return reason
    last = getattr(module, weight_names(module)[1])
    shape = last.form.shape if isinstance(last, Panels) else last.shape
    hidden = shape[1 if getattr(module, "is_transposed", False) else 2]
    return why_no_panels(None, hidden, last.dtype, columns=columns_of_panels(),
                         features="hidden features")


def _why_not_linear(layers: ModelLayers, module, groups: int) -> str:
    if reason := layers.why_not_linear(module):
        return reason
    columns = columns_of_panels()
    if groups > 1 and module.out_features // groups % columns:
        return (f"expected a multiple of {columns} outputs a group, the columns of a panel on this "
                f"CPU, found {module.out_features // groups}")
    return why_no_panels(module.out_features, module.in_features, module.weight.dtype,
                         columns=columns)


# ---- packing -----------------------------------------------------------------------


def _pack_experts(model, tally: Tally, loan: Loan | None = None) -> None:
    layers = ModelLayers(model)
    for name, module in model.named_modules():
        if not is_experts(module) or not _unpacked(module, weight_names(module)):
            continue
        if reason := _why_not(layers, module, any_implementation=loan is not None):
            tally.keep(name, module, reason)
            continue
        _pack(module, loan)
        if loan is not None and (before := run_by_kernels(module)):
            loan.add_implementation(module.config, before)
        tally.change(name, module)


def _pack_linears(model, tally: Tally, loan: Loan | None = None) -> None:
    layers = ModelLayers(model)
    for name, module in model.named_modules():
        groups = _groups(module)
        if groups == 0 or module.in_features == 0 or not _unpacked(module, ["weight"]):
            continue
        if is_of_router(name):
            tally.keep(name, module, OF_ROUTER, silently=True)
            continue
        # What PEFT trains keeps its gradients; a loan ends when it is trained.
        if loan is None and layers.is_trained_by_peft(module):
            tally.keep(name, module, TRAINED, silently=True)
            continue
        if reason := _why_not_linear(layers, module, groups):
            tally.keep(name, module, reason)
            continue
        kind = type(module).__name__
        _pack_weights(module, [("weight", "none")], transposed=False, loan=loan)
        if not isinstance(module, PackedLinear):
            _change_class(module, groups)
        tally.change(name, module, f"which was {kind}")


def _groups(module) -> int:
    """Those of a linear layer, packed or not; 0 of any other module."""
    if type(module) is PackedGroupedLinear:
        return module.n_groups
    return 1 if type(module) is PackedLinear else groups_of(module)


def _change_class(module, groups):
    if groups == 1:
        module.__class__ = PackedLinear
        return
    module.packed_class = type(module)
    module.__class__ = PackedGroupedLinear


def _restore_class(module):
    """That of a layer without panels."""
    kind = vars(module).pop("packed_class", torch.nn.Linear)
    if isinstance(module, PackedLinear):
        module.__class__ = kind


def _pack(module, loan):
    activation = layer_activation(module)
    assert activation is not None
    gates = zip(weight_names(module), (activation.gate, "none"))
    keep_activation(module, activation)
    _pack_weights(module, gates, getattr(module, "is_transposed", False), loan)


def _pack_weights(module, gates, transposed, loan):
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
            pack_parameter(weight, transposed=transposed, halves=gate == "concatenated",
                           loan=loan)


def _unpack_weights(module):
    for weight in _packed(module).values():
        _unpack(weight)


def _unpack(weight):
    if weight.loan is None:
        unpack_parameter(weight)
    else:
        weight.loan.give_back([weight])


def _packed(module) -> dict[str, PackedWeight]:
    """The packed weights that a module has itself, by name."""
    return {n: w for n, w in module._parameters.items() if isinstance(w, PackedWeight)}


def _unpacked(module, names) -> list[str]:
    """Those of the names whose weights are to be packed; quantized ones lie in panels."""
    return [name for name in names
            if not isinstance(getattr(module, name), (Panels, QuantizedWeight))]


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


__all__ = ["Changes", "pack_experts", "pack_linears", "unpack_experts", "unpack_linears"]
