"""What the masks of attention say: which query may see which key."""

import math

import torch
from torch.fx import Node

from .mixing import is_triangle, through_broadcasts
from .patterns import NEGATIONS, aten, filled_with, masked, same_sizes, through, through_idle_slices
from .reading import dtype, is_call, read, source, value

_AND = (aten.__and__.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor)


def is_causal(mask: Node) -> bool:
    """Whether a mask, of booleans or of what is added to logits, leaves the keys up to the
    token's own."""
    if dtype(mask) != torch.bool:
        above = read(through_broadcasts(mask), {aten.triu.default}, "diagonal")
        if above is not None:
            return filled_with(above.source) == -math.inf and above.diagonal == 1
    found = _pairs(mask)
    return found is not None and same_sizes(found[0], mask, slice(-2, None)) \
        and is_triangle(*found)


def causal_but_for(mask: Node, key_mask: Node | None) -> bool | None:
    """Whether the mask is causal, where it hides the keys that `key_mask` [batch, nk] hides and
    none but later ones beside; None where it says anything else."""
    found = _pairs(mask)
    if found is None or found[1]:
        return None
    causal, by_key = False, False
    for part in _conjuncts(found[0]):
        if same_sizes(part, mask, slice(-2, None)) and is_triangle(part, False):
            causal = True
        elif _key_mask(part) is key_mask:
            by_key = True
        elif filled_with(part) != 1:
            return None
    return causal if by_key else None


def _pairs(mask):
    """(pairs, drops): the mask leaves the pairs where the booleans are true, or hides them if
    `drops`; None where it does more than that."""
    if dtype(mask) != torch.bool:
        found = masked(through_broadcasts(mask, rows=True))
        if found is None:
            return None
        base, mask, fill, drops = found
        values = filled_with(base), fill
        if values == (-math.inf, 0.0):
            drops = not drops
        elif values != (0.0, -math.inf):
            return None
    else:
        drops = False
    return (source(mask), False) if drops and read(mask, NEGATIONS) else (mask, drops)


def _conjuncts(mask):
    mask = through(mask, {aten.expand.default})
    both = read(mask, _AND, "other")
    if both is None:
        return [mask]
    return [part for x in (both.source, both.other) for part in _conjuncts(x)]


def _key_mask(mask):
    """The mask [batch, nk] that one of pairs, [batch, 1, 1, nk], repeats; None where it is none."""
    mask = through(mask, {aten.expand.default})
    if value(mask).dim() != 4 or [str(size) for size in value(mask).shape[1:3]] != ["1", "1"]:
        return None
    mask = through_idle_slices(mask)
    while is_call(mask, aten.unsqueeze.default):
        mask = through_idle_slices(source(mask))
    return mask
