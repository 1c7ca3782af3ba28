"""Routers as layers of the package `kernels`, which replaces forwards by names of layers."""

from typing import Any

import torch

from .raised_forward import RaisedForward

# Names that transformers gives to the classes of its routers.
NAMES = ("SoftmaxTopKRouter",)

# The attribute of a module that `kernelize` has changed with its raised forward. A layer of
# `kernels` may have no members, and copies of a module take theirs along.
_RAISED = "_moe_raised_forward"


class Router(torch.nn.Module):
    """A layer without state or constructor, as `kernels` wants it: modules get its forward."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: torch.Tensor) -> Any:
        # Models of other scores have the same name for their routers, so the graph is that of the
        # module's own code.
        forward = vars(self).get(_RAISED)
        if forward is None:
            forward = RaisedForward(self)
            setattr(self, _RAISED, forward)
        return forward(hidden_states)


class RouterRepository:
    """What `kernels` calls a repository: it has the layer, and nothing is loaded from a network."""

    layer_name = "Router"

    def load(self) -> type[torch.nn.Module]:
        return Router

    def __str__(self) -> str:
        return "moe_mlir.hf (layer `Router`)"


_REPOSITORY = RouterRepository()


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """Routers for the package `kernels`: `kernelize` then runs their selection as one op.

    A router is a module whose class has the layer name "SoftmaxTopKRouter", which transformers
    gives to those of Qwen3.5-MoE and Laguna, and `kernels.replace_kernel_forward_from_hub` to any
    other. Its own forward is traced, as by `patch`, so that a router with other scores is right,
    too. Experts have no name there: `model.set_experts_implementation("moe")`.

    Returns:
        `{layer name: {"cpu": repository}}`, for all modes, training and `torch.compile` included.

    Example:
        >>> kernels.register_kernel_mapping(moe_mlir.hf.kernel_mapping())
        >>> model = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    """
    return {name: {"cpu": _REPOSITORY} for name in NAMES}
