"""Tolerances and legality of docs/Spec.md section 1: the rules by which op tests judge."""

import math

import torch

ULP = 2.0**-24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def score_tolerance(largest_logit):
    """Of probabilities and gates, with L the largest finite |logit| of the problem."""
    return min(1.0, 1e-6 + 8 * ULP * float(largest_logit))


def logit_tolerance(z, width):
    """Of router logits z [.., e] from tokens of `width` features."""
    return 1e-6 + (8 + math.sqrt(width)) * ULP * largest(z)


def gradient_tolerance(forward, grad):
    """20 times the forward bound, scaled by the largest gradient."""
    return 20 * forward * max(largest(grad), 1e-30)


def largest(x):
    """The largest finite magnitude, 0 without any."""
    x = x[x.isfinite()].abs()
    return float(x.max()) if x.numel() else 0.0


def assert_close(actual, expected, atol, what=""):
    """Equal within atol everywhere, NaN and infinities in the same places."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    actual, expected = actual.detach().double(), expected.detach()
    special = ~expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    assert bool(same[special].all()), f"{what}: NaN or infinity in other places"
    error = largest_error(actual[~special], expected[~special])
    assert error <= atol, f"{what}: error {error:.3e} exceeds {atol:.3e}"


def largest_error(actual, expected):
    if not actual.numel():
        return 0.0
    error = float((actual - expected).abs().max())
    return math.inf if math.isnan(error) else error


def assert_legal_selection(indices, scores, atol, mask=None):
    """Rules (1) to (4) for indices [.., k] given float64 scores [.., e]."""
    experts, k = scores.shape[-1], indices.shape[-1]
    rows = zip(
        indices.reshape(-1, k).tolist(),
        scores.reshape(-1, experts).tolist(),
        [True] * (indices.numel() // k) if mask is None else mask.reshape(-1).tolist(),
        strict=True,
    )
    for row, (chosen, score, valid) in enumerate(rows):
        where = f"row {row}: {chosen}"
        if not valid:
            assert chosen == [-1] * k, f"{where}: a masked token must select -1"
            continue
        assert len(set(chosen)) == k, f"{where}: an expert is selected twice"
        assert all(0 <= expert < experts for expert in chosen), f"{where}: out of range"
        if any(math.isnan(s) or s == math.inf for s in score):
            continue
        values = [score[expert] for expert in chosen]
        kth = sorted(score, reverse=True)[k - 1]
        assert all(v >= kth - atol for v in values), f"{where}: below the k-th best {kth}"
        for before, after in zip(values, values[1:]):
            assert after <= before + atol, f"{where}: scores {values} rise"


def bits(x):
    """The bit pattern, so that equality also tells NaN payloads and signs of zero apart."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def assert_same_bits(a, b, what=""):
    assert torch.equal(bits(a), bits(b)), f"{what}: results differ bitwise"


def strided(x):
    """The same values in memory that is neither contiguous nor aligned."""
    padded = torch.empty(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
    view = padded[..., 1::2]
    view.copy_(x)
    return view


def unaligned(x):
    """The same values, contiguous, starting one element off the allocation."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
    return flat.copy_(x.reshape(-1)).view(x.shape)


def random(seed):
    return torch.Generator().manual_seed(seed)
