"""Translates a torch.export program to the text of an MLIR module.

The op table is split by family; each file registers its operators on import:
elementwise, complex (rotary pairs), shape (views, slices, constants), rearrange,
matmul, convolution, index (gathers), scatter, reduce (softmax, norms), scans, triangular,
moe (routers), dispatch (the ops around them), experts (grouped layers). What has no entry is
decomposed by fallback.
"""

from . import (  # noqa: F401
    complex,
    convolution,
    dispatch,
    elementwise,
    experts,
    index,
    matmul,
    moe,
    rearrange,
    reduce,
    scans,
    scatter,
    shape,
    triangular,
)
from .context import ImportFailed
from .fallback import decompose_missing
from .program import ImportedProgram, import_program

__all__ = ["ImportFailed", "ImportedProgram", "decompose_missing", "import_program"]
