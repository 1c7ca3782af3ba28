"""The model families that the compiler is checked on, as tiny random models.

`python -m moe_mlir_bench.models` measures each and writes the table of docs/Models.md.
Needs transformers; nothing is downloaded.
"""

from .families import FAMILIES, Family

__all__ = ["FAMILIES", "Family"]
