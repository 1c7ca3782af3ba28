"""What the ops on attention's queries and keys share: biases over pairs, and masks."""

from ._check import ACTIVATIONS, MASK


def validate_pairs(check, q, k, bias, mask, scale, window):
    """The operands and options that decide the logits scale q.k + bias."""
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
    if scale is not None:
        check.finite("scale", scale)
    if window is not None:
        check.at_least("window", window, 1)


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
