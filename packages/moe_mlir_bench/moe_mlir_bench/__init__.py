"""What measures, checks and shows the compiler `moe_mlir`: benchmark, models, demonstration, GPU.

Example:
    >>> from moe_mlir_bench.models import FAMILIES
    >>> "Mixtral" in FAMILIES
    True
"""
