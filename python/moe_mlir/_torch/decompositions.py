"""Of torch's decompositions, which are loaded with torch.export."""

from torch._decomp import decomposition_table as decompositions

__all__ = ["decompositions"]
