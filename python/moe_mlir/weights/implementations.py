"""Which of transformers' implementations a layer of experts runs by."""

import torch

from ..nn import MoELayer


def run_by_kernels(module: torch.nn.Module) -> str | None:
    """Sets the implementation of a layer's model to "moe", which reads panels and codes.

    Returns:
        the name of the one before; None if that was the same, or for a layer of our own.
    """
    if type(module) is MoELayer:
        return None
    from .._transformers import experts_interface  # noqa: F401  registers "moe"; asks for transformers

    before = module.config._experts_implementation
    module.config._experts_implementation = "moe"
    return None if before == "moe" else before


__all__ = ["run_by_kernels"]
