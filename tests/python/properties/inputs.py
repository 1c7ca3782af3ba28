"""Inputs of the property tests: random and adversarial rows, garbage in padding.

A kernel is compiled for each static shape, so hypothesis draws those from
small pools; the number of tokens is dynamic and drawn freely.
"""

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from op_judge import random

from moe_mlir import ops

INF, NAN = math.inf, math.nan
TOKENS = st.sampled_from((0, 1, 2, 3, 7, 16, 33, 64))
SEEDS = st.integers(0, 2**31 - 1)
# New ones each run (../seeds.py), hence fewer than would have to find everything at once.
examples = settings(max_examples=100)


def op(name):
    """The compiled op; a test of one that does not exist is skipped."""
    if not hasattr(ops, name):
        pytest.skip(f"moe.{name} has no kernel")
    return getattr(ops, name)


def uniform(*shape, g):
    return torch.rand(*shape, generator=g)


def normal(*shape, g, scale=1.0):
    return scale * torch.randn(*shape, generator=g)


def choice(options, g):
    return options[int(torch.randint(len(options), (), generator=g))]


_ROWS = {
    "normal": lambda e, g: normal(e, g=g, scale=4),
    "wide": lambda e, g: normal(e, g=g, scale=100),
    "ties": lambda e, g: torch.randint(-2, 3, (e,), generator=g).float(),
    "equal": lambda e, g: torch.full((e,), 0.5),
    "zeros": lambda e, g: torch.where(uniform(e, g=g) < 0.5, 0.0, -0.0),
    "huge": lambda e, g: 1e38 * torch.randint(-3, 4, (e,), generator=g).float(),
    "tiny": lambda e, g: 1e-41 * torch.randint(-9, 10, (e,), generator=g).float(),
    "masked": lambda e, g: normal(e, g=g).masked_fill(uniform(e, g=g) < 0.5, -INF),
    "empty": lambda e, g: torch.full((e,), -INF),
    "infinite": lambda e, g: normal(e, g=g).masked_fill(uniform(e, g=g) < 0.3, INF),
    "nan": lambda e, g: normal(e, g=g).masked_fill(uniform(e, g=g) < 0.3, NAN),
    "all nan": lambda e, g: torch.full((e,), NAN),
    "far apart": lambda e, g: normal(e, g=g) + 1e4 * (torch.arange(e) % 3),
}


def score_rows(n, experts, g, kinds=tuple(_ROWS)):
    """[n, experts], each row of its own kind."""
    rows = [_ROWS[choice(kinds, g)](experts, g) for _ in range(n)]
    return torch.stack(rows) if rows else torch.empty(0, experts)


def probability_rows(n, experts, g):
    """Probabilities with exact zeros, ties, underflow, NaN and empty rows."""
    kinds = ("normal", "wide", "ties", "masked", "equal", "huge")
    p = torch.nan_to_num(score_rows(n, experts, g, kinds).softmax(-1), nan=0.0)
    for row in range(n):
        what = choice(("as is",) * 6 + ("zero", "nan", "tiny"), g)
        if what == "zero":
            p[row] = 0
        elif what == "nan":
            p[row, int(torch.randint(experts, (), generator=g))] = NAN
        elif what == "tiny":
            p[row] *= 1e-30
    return p


def padding(n, g, share=0.3):
    """bool [n], True = real token; now and then all or none."""
    how = choice(("some",) * 4 + ("all", "none"), g)
    mask = uniform(n, g=g) > share
    return mask if how == "some" else torch.full((n,), how == "all")


def with_garbage(x, mask, g):
    """x with NaN, infinities and huge values in the masked tokens (dim -2): E11."""
    garbage = torch.tensor([NAN, INF, -INF, 3e38])[torch.randint(4, x.shape, generator=g)]
    return torch.where(mask[..., None], x, garbage)


def features(n, d, g):
    """Token features: LayerNorm-like, small, with twins, zeros, or a large common offset."""
    how = choice(("normal", "small", "large", "twins", "zeros", "offset"), g)
    x = normal(n, d, g=g)
    if how == "small":
        x = 0.1 * x
    elif how == "large":
        x = 5 * x
    elif how == "twins" and n:
        x = x[torch.randint(n, (n,), generator=g)]
    elif how == "zeros":
        x = x.masked_fill(uniform(n, 1, g=g) < 0.4, 0.0)
    elif how == "offset":
        x = x + 30
    return x


def selections(n, experts, k, g):
    """Distinct experts a token [n, k]; some tokens nowhere."""
    idx = uniform(n, experts, g=g).argsort(-1)[:, :k]
    return idx.masked_fill(uniform(n, 1, g=g) < 0.15, -1)


def generator(seed):
    return random(seed)
