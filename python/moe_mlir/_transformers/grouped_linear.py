"""Linear layers of models whose weight is block-diagonal: a matrix for each group of features.

DeepSeek-V4 projects its heads by groups: `weight [out, in]` is seen as `[groups, out / groups, in]`,
and `x [.., groups, in]` gives `[.., groups, out / groups]`.
"""

import torch

# (module, name) of the classes that compute just that, without their bias.
_CLASSES = {("transformers.models.deepseek_v4.modeling_deepseek_v4", "DeepseekV4GroupedLinear")}


def groups_of(module: torch.nn.Module) -> int:
    """The groups of such a layer; 1 of `torch.nn.Linear`, 0 of any other."""
    kind = type(module)
    if kind is torch.nn.Linear:
        return 1
    return module.n_groups if (kind.__module__, kind.__name__) in _CLASSES else 0


__all__ = ["groups_of"]
