"""The rows of a triangular inverse, one after the other: one op for a loop that models write.

Not public: `patching/substitution.py` puts it in the place of such loops while a model is traced.
"""

import torch

_LIBRARY = torch.library.Library("moe", "FRAGMENT")
_LIBRARY.define("forward_substitution(Tensor matrix, int rows) -> Tensor")


def _forward_substitution(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """To each row below `rows` what the rows above it, finished already, add with its weights."""
    result = matrix.clone(memory_format=torch.contiguous_format)
    for i in range(1, rows):
        row = result[..., i, :i].clone()
        sub = result[..., :i, :i].clone()
        result[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    return result


def _fake(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    return matrix.new_empty(matrix.shape)


_LIBRARY.impl("forward_substitution", _forward_substitution, "CompositeExplicitAutograd")
torch.library.register_fake("moe::forward_substitution", _fake, lib=_LIBRARY)
