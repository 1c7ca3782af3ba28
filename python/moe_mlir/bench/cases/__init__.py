"""Every row, in the order of the page: all shapes with a stated goal, and a few beside them."""

from . import calls, experts, layers, mixing, selection, statistics

ROWS = [
    *selection.ROWS,
    *mixing.ROWS,
    *statistics.ROWS,
    *experts.ROWS,
    *layers.ROWS,
    *calls.ROWS,
]
