"""What the masks of attention say: which query may see which key."""

import math

import torch

from .mixing import is_triangle
from .patterns import (CASTS, VIEWS, argument, aten, dtype, filled_with, is_call, masked,
                       same_shape, through, value)

_BROADCASTS = VIEWS | CASTS | {aten.unsqueeze.default, aten.expand.default}
_NOT = (aten.logical_not.default, aten.bitwise_not.default)
_AND = (aten.__and__.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor)


def is_causal(mask) -> bool:
    """Whether a mask, of booleans or of what is added to logits, leaves the keys up to the
    token's own."""
    if dtype(mask) != torch.bool:
        above = through(mask, _BROADCASTS)
        if is_call(above, aten.triu.default):
            return argument(above, 1, "diagonal", 0) == 1 and filled_with(above.args[0]) == -math.inf
    found = _pairs(mask)
    return found is not None and is_triangle(*found)


def causal_but_for(mask, key_mask):
    """Whether the mask is causal, where it hides the keys that `key_mask` [batch, nk] hides and
    none but later ones beside; None where it says anything else."""
    found = _pairs(mask)
    if found is None or found[1]:
        return None
    causal, by_key = False, False
    for part in _conjuncts(found[0]):
        if is_triangle(part, False):
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
        found = masked(through(mask, _BROADCASTS))
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
    return (mask.args[0], False) if drops and is_call(mask, *_NOT) else (mask, drops)


def _conjuncts(mask):
    mask = through(mask, {aten.expand.default})
    if not is_call(mask, *_AND):
        return [mask]
    return [part for x in mask.args[:2] for part in _conjuncts(x)]


def _key_mask(mask):
    """The mask [batch, nk] that one of pairs, [batch, 1, 1, nk], repeats; None where it is none."""
    mask = through(mask, {aten.expand.default})
    if value(mask).dim() != 4 or [str(size) for size in value(mask).shape[1:3]] != ["1", "1"]:
        return None
    while is_call(mask, aten.unsqueeze.default) or _is_idle_slice(mask):
        mask = mask.args[0]
    return mask


def _is_idle_slice(node) -> bool:
    return is_call(node, aten.slice.Tensor) and same_shape(node, node.args[0])
