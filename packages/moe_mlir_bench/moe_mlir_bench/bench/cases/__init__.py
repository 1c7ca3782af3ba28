"""Every row, in the order of the page: all shapes with a stated goal, and a few beside them."""

from typing import Any

from . import calls, experts, gated_experts, layers, mixing, products, selection, statistics

# What each is, `bench.rows` says.
ROWS: list[Any] = [
    *selection.ROWS,
    *mixing.ROWS,
    *statistics.ROWS,
    *experts.ROWS,
    *products.ROWS,
    *gated_experts.ROWS,
    *layers.ROWS,
    *calls.ROWS,
]
