"""What the ops on attention's queries and keys share: options and biases of pairs, and masks."""

import math
from dataclasses import dataclass

import torch

from ._check import ACTIVATIONS, MASK
from ._kernel import Tensor, enum, f64, visibility


@dataclass(frozen=True)
class PairOptions:
    """Which keys a query sees, and how their logits scale q.k + bias are computed."""

    scale: float | None
    causal: bool
    window: int | None
    exclude_self: bool
    precision: str

    def attributes(self, width):
        """Those of a kernel on heads of this width."""
        yield "visibility", visibility(self.causal, self.window, self.exclude_self)
        yield "precision", enum("precision", self.precision)
        yield "scale", f64(1 / math.sqrt(width) if self.scale is None else self.scale)


def pair_options(check, scale, causal, window, exclude_self, precision):
    """The fields of PairOptions, of what a user gave for them."""
    window = check.integer("window", window, optional=True)
    if scale is not None:
        check.number("scale", scale)
        scale = float(scale)
    return scale, bool(causal), window, bool(exclude_self), precision


def validate_pairs(check, q, k, bias, mask, options, query_mask=None):
    """The operands and options that decide the logits scale q.k + bias, and their pairs."""
    scale, window = options.scale, options.window
    check.dtype("q", q, ACTIVATIONS)
    check.dtype("k", k, ACTIVATIONS)
    check.rank("q", q, "[batch, heads, n, head_width]")
    check.rank("k", k, "[batch, heads, nk, head_width]")
    batch, heads, n, width = q.shape
    nk = k.shape[2]
    check.shape("k", k, (batch, heads, nk, width), "[batch, heads, nk, head_width]")
    check.same_dtype("k", k, "q", q)
    check.at_least("head_width", width, 1)
    if bias is not None:
        _validate_bias(check, bias, (batch, heads, n, nk))
    if mask is not None:
        check.dtype("mask", mask, MASK)
        check.shape("mask", mask, (batch, nk), "[batch, nk]")
    if query_mask is not None:
        check.dtype("query_mask", query_mask, MASK)
        check.shape("query_mask", query_mask, (batch, n), "[batch, n]")
    if scale is not None:
        check.finite("scale", scale)
    if window is not None:
        check.at_least("window", window, 1)
    check.choice("precision", options.precision, ("ieee", "tf32"))


def mask_of_queries(q, k, mask, query_mask=None):
    """The queries' mask: as given, or that of as many keys, which are the same tokens."""
    if query_mask is None and mask is not None and q.shape[2] == k.shape[2]:
        return mask
    return query_mask


def mask_inputs(masks_queries, masks_keys):
    """The masks as operands of a kernel."""
    if masks_queries:
        yield Tensor("query_mask", ("b", "n"), torch.bool, clause="query_mask")
    if masks_keys:
        yield Tensor("key_mask", ("b", "m"), torch.bool, clause="key_mask")


def _validate_bias(check, bias, full):
    check.dtype("bias", bias, ACTIVATIONS)
    padded = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if (
        len(padded) != 4
        or padded[2:] != full[2:]
        or not all(_broadcasts(size, whole) for size, whole in zip(padded[:2], full[:2]))
    ):
        check.fail(
            "expected 'bias' to have shape [batch or 1, heads or 1, n, nk] for "
            f"{full}, found {tuple(bias.shape)}"
        )


def _broadcasts(size, whole):
    # In this order traced code asks nothing of open sizes.
    return (isinstance(size, int) and size == 1) or size == whole or size == 1


def four_dims(bias):
    """A bias as `[batch or 1, heads or 1, n, nk]`."""
    if bias is None or bias.dim() == 4:
        return bias
    return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))


def bias_form(bias):
    """Which of batch and heads a bias of four dims has."""
    return None if bias is None else (bias.shape[0] != 1, bias.shape[1] != 1)


def bias_dims(form, heads):
    has_batch, has_heads = form
    return ("b" if has_batch else 1, heads if has_heads else 1, "n", "m")
