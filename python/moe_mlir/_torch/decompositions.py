"""Of torch's decompositions, which are loaded with torch.export."""

from torch._decomp import decomposition_table as decompositions
from torch._dispatch.python import enable_python_dispatcher

__all__ = ["decompositions", "enable_python_dispatcher"]
