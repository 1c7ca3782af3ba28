"""Kernels written in Triton, compiled for three chips without a GPU: the simulator's test from outside.

`python tests/python/sim/triton_kernels/table.py` prints what each family shows.
"""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # What Triton 3.9 does, without its warning.

from . import attention, elements, experts, orders, products, rows  # noqa: E402, F401
from .family import CHIPS, FAMILIES, POLICIES, SEEDS, Case, Family  # noqa: E402, F401

#: Every kernel of every family, for mutation.py.
CASES = [Case(family, chip, step) for family in FAMILIES.values() for chip in family.chips
         for step in range(family.steps(chip))]
