"""Buffers to which a forward assigns other tensors, as writes to the tensors that it had.

torch.export keeps `self.mean = 0.9 * self.mean` only where the module is the one that it exports,
and says nothing of modules inside of it.
"""

from typing import Any

import torch

from .._torch.core import pytree
from .trace_errors import TraceFailed


class AssignedBuffers:
    """The buffers of a model before its forward."""

    def __init__(self, model: torch.nn.Module):
        self._before = [(name, module, dict(module._buffers)) for name, module in model.named_modules()
                        if module._buffers]
        self._parameters = [(name, module, dict(module._parameters))
                            for name, module in model.named_modules() if module._parameters]

    def store(self, outputs: Any) -> Any:
        """Writes what the forward assigned, and returns its outputs as they were before that."""
        for path, module, before in self._parameters:
            for name, old in before.items():
                if module._parameters.get(name, old) is not old:
                    raise TraceFailed(
                        f"expected a forward that keeps its parameters, found that it assigns another to "
                        f"'{_dotted(path, name)}'; write in place under torch.no_grad(), or make it a buffer")
        assigned = [(module._buffers, name, old, _like(old, module._buffers[name], _dotted(path, name)))
                    for path, module, before in self._before for name, old in before.items()
                    if module._buffers.get(name, old) is not old]
        if not assigned:
            return outputs
        kept = {_memory(old) for _, _, old, _ in assigned}
        outputs = pytree.tree_map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) and _memory(x) in kept else x, outputs)
        # One may be assigned what another had.
        values = [new.clone() if _memory(new) in kept else new for _, _, _, new in assigned]
        for (buffers, name, old, _), value in zip(assigned, values, strict=True):
            old.copy_(value)
            buffers[name] = old
        return outputs


def _like(old, new, name) -> torch.Tensor:
    """The new tensor, which must have the type of the old one."""
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) \
            or old.dtype != new.dtype or list(old.shape) != list(new.shape):
        raise TraceFailed(
            f"expected buffer '{name}' to keep its dtype and shape, {_form(old)}, found that the forward "
            f"assigns {_form(new)}; return the new value instead")
    return new


def _dotted(path, name) -> str:
    return f"{path}.{name}" if path else name


def _form(tensor) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _memory(tensor):
    return tensor.untyped_storage()._cdata
