"""Wrong arguments of the logits ops and their statistics: named, with what was expected."""

import re

import pytest
import torch

import moe_mlir

Z = torch.zeros
IDX = Z(4, 1, dtype=torch.int64)


def raises(error, message, function, *args, **kwargs):
    with pytest.raises(error, match=re.escape(message)):
        function(*args, **kwargs)


COSINE = [
    (ValueError, "expected 'emb' to have shape [experts, c of 'omega'] = (3, 5), found (3, 8)",
     (Z(4, 8), Z(5, 8), Z(3, 8)), {}),
    (ValueError, "expected 'emb' to have shape [experts, d of 'h'] (no 'omega' was given) = (3, 8)",
     (Z(4, 8), None, Z(3, 5)), {}),
    (ValueError, "expected 'omega' to have shape [c, d of 'h']", (Z(4, 8), Z(5, 7), Z(3, 5)), {}),
    (ValueError, "expected 'eps' to be positive and finite, found 0.0",
     (Z(4, 8), None, Z(3, 8)), dict(eps=0)),
    (ValueError, "expected 'tau' to be positive and finite, found -1.0",
     (Z(4, 8), None, Z(3, 8)), dict(tau=-1)),
    (TypeError, "expected 'emb' to be a tensor, found NoneType", (Z(4, 8), Z(5, 8), None), {}),
    (TypeError, "expected 'h' to have dtype", (Z(4, 8).long(), None, Z(3, 8)), {}),
    (TypeError, "expected 'eps' to be a number, found str", (Z(4, 8), None, Z(3, 8)), dict(eps="1")),
]  # fmt: skip


@pytest.mark.parametrize("error,message,args,kwargs", COSINE)
def test_cosine_logits(error, message, args, kwargs):
    raises(error, "cosine_logits: " + message, moe_mlir.cosine_logits, *args, **kwargs)


@pytest.mark.parametrize(
    "error,message,changed",
    [
        (ValueError, "expected 'w1' to have shape [hidden, c of 'embedding'] = (9, 6)", dict(w1=Z(9, 5))),
        (ValueError, "expected 'b1' to have shape", dict(b1=Z(8))),
        (ValueError, "expected 'w2' to have shape", dict(w2=Z(36, 8))),
        (ValueError, "expected 'b2' to have shape", dict(b2=Z(35))),
        (
            ValueError,
            "expected 'w2' to have num_experts * (d + 1) rows with num_experts = 5, found 36",
            dict(num_experts=5),
        ),
        (ValueError, "expected 'num_experts' to be at least 1", dict(num_experts=0)),
        (TypeError, "expected 'embedding' to have dtype", dict(embedding=Z(6).double())),
        (TypeError, "expected 'num_experts' to be an int, found float", dict(num_experts=4.0)),
    ],
)
def test_hyper_router(error, message, changed):
    x = dict(embedding=Z(6), w1=Z(9, 6), b1=Z(9), w2=Z(36, 9), b2=Z(36), num_experts=4)
    raises(error, "hyper_router: " + message, moe_mlir.hyper_router, **{**x, **changed})


@pytest.mark.parametrize(
    "error,message,changed",
    [
        (ValueError, "expected 'metric' to have shape [experts, d] of 'emb' = (3, 8)", dict(metric=Z(2, 8))),
        (TypeError, "expected 'metric' to have dtype float32", dict(metric=Z(3, 8).half())),
        (ValueError, "expected 'emb' to have shape", dict(emb=Z(3, 7))),
        (TypeError, "expected 'prev_indices' to have dtype int32 or int64", dict(prev_indices=Z(4, 1))),
        (ValueError, "expected 'prev_indices' to have shape", dict(prev_indices=IDX[:3])),
        (ValueError, "at least one place a token, found 0", dict(prev_indices=IDX[:, :0])),
        (
            ValueError,
            "expected 'prev_gates' with more than one previous expert a token (2), found None",
            dict(prev_indices=IDX.repeat(1, 2)),
        ),
        (ValueError, "expected 'prev_gates' to have shape", dict(prev_gates=Z(4, 2))),
        (ValueError, "expected 'bias' to have shape", dict(bias=Z(4))),
    ],
)
def test_ac_logits(error, message, changed):
    x = dict(h=Z(4, 8), metric=Z(3, 8), prev_indices=IDX, emb=Z(3, 8))
    raises(error, "ac_logits: ", moe_mlir.ac_logits, **{**x, **changed})
    raises(error, message, moe_mlir.ac_logits, **{**x, **changed})


@pytest.mark.parametrize(
    "error,message,changed",
    [
        (ValueError, "expected 'eps' to be positive and finite, found 0.0", dict(eps=0.0)),
        (ValueError, "expected 'clamp' to be positive and finite, found -1.0", dict(clamp=-1)),
        (ValueError, "expected 'scale' to be one of 'cluster', 'feature'", dict(scale="mean")),
        (ValueError, "expected 'counts' to have shape", dict(counts=Z(4).int())),
        (TypeError, "expected 'counts' to have dtype", dict(counts=Z(3))),
        (TypeError, "expected 'dispersion' to have dtype float32", dict(dispersion=Z(3, 8).half())),
    ],
)
def test_dispersion_weights(error, message, changed):
    x = dict(dispersion=Z(3, 8), counts=Z(3).int())
    raises(error, message, moe_mlir.dispersion_weights, **{**x, **changed})


@pytest.mark.parametrize(
    "error,message,changed",
    [
        (TypeError, "causal", dict(causal=...)),
        (ValueError, "expected 'q' to have 4 dims", dict(q=Z(3, 5, 4))),
        (ValueError, "expected 'k' to have shape", dict(k=Z(2, 2, 5, 4))),
        (TypeError, "expected 'k' to have the dtype of 'q'", dict(k=Z(2, 3, 5, 4).half())),
        (
            ValueError,
            "expected 'bias' to have shape [batch or 1, heads or 1, n, nk]",
            dict(bias=Z(2, 5, 5)),
        ),
        (ValueError, "expected 'mask' to have shape", dict(mask=Z(2, 3).bool())),
        (ValueError, "expected 'window' to be at least 1", dict(window=0)),
        (ValueError, "expected 'scale' to be finite", dict(scale=float("inf"))),
        (ValueError, "expected 'precision' to be one of", dict(precision="bf16")),
    ],
)
def test_attention_entropy(error, message, changed):
    x = {**dict(q=Z(2, 3, 5, 4), k=Z(2, 3, 5, 4), causal=True), **changed}
    x = {name: value for name, value in x.items() if value is not ...}
    raises(error, message, moe_mlir.attention_entropy, **x)
    raises(error, message, moe_mlir.attention, v=Z(2, 3, 5, 6), **x)


@pytest.mark.parametrize(
    "error,message,v",
    [
        (TypeError, "expected 'v' to be a tensor", 1.0),
        (TypeError, "expected 'v' to have dtype", Z(2, 3, 5, 6).double()),
        (ValueError, "expected 'v' to have 4 dims", Z(3, 5, 6)),
        (ValueError, "expected 'v' to have shape [batch, heads, nk, value_width]", Z(2, 3, 4, 6)),
    ],
)
def test_attention(error, message, v):
    x = dict(q=Z(2, 3, 5, 4), k=Z(2, 3, 5, 4), causal=True)
    raises(error, message, moe_mlir.attention, v=v, **x)
