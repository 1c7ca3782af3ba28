"""Wrong arguments: one exception that names the argument, what was expected, what was found."""

import re

import pytest
import torch

import moe_mlir

F, Z = torch.float32, torch.zeros


def raises(error, message, function, *args, **kwargs):
    with pytest.raises(error, match=re.escape(message)):
        function(*args, **kwargs)


TOPK = [
    (ValueError, "expected 'k' in [1, 8] (the number of experts), found 9", (Z(4, 8), 9), {}),
    (ValueError, "expected 'k' in [1, 8] (the number of experts), found 0", (Z(4, 8), 0), {}),
    (TypeError, "expected 'k' to be an int, found float", (Z(4, 8), 2.0), {}),
    (TypeError, "expected 'k' to be an int, found bool", (Z(4, 8), True), {}),
    (TypeError, "expected 'scores' to be a tensor, found list", ([1.0], 1), {}),
    (
        ValueError,
        "expected 'scores' to have dims [.., experts], found a 0-d tensor",
        (Z(()), 1),
        {},
    ),
    (TypeError, "float32 or bfloat16 or float16, found float64", (Z(4, 8).double(), 2), {}),
    (TypeError, "expected 'scores' to have dtype", (Z(4, 8).int(), 2), {}),
    (
        ValueError,
        "expected 'kind' to be one of 'logits', 'probs'",
        (Z(4, 8), 2),
        dict(kind="logit"),
    ),
    (ValueError, "found (5,)", (Z(4, 8), 2), dict(mask=Z(5, dtype=torch.bool))),
    (
        TypeError,
        "expected 'mask' to have dtype bool, found int32",
        (Z(4, 8), 2),
        dict(mask=Z(4).int()),
    ),
    (ValueError, "torch.int32 or torch.int64", (Z(4, 8), 2), dict(index_dtype=torch.int16)),
    (
        ValueError,
        "expected 'route_scale' to be finite",
        (Z(4, 8), 2),
        dict(route_scale=float("nan")),
    ),
    (TypeError, "expected 'route_scale' to be a number", (Z(4, 8), 2), dict(route_scale="1")),
]


@pytest.mark.parametrize("error,message,args,kwargs", TOPK)
def test_topk_renorm(error, message, args, kwargs):
    raises(error, message, moe_mlir.topk_renorm, *args, **kwargs)


def test_topk_renorm_e8_is_checked_in_the_torch_op_too():
    with pytest.raises(ValueError, match="expected 'k'"):
        torch.ops.moe.topk_renorm(Z(4, 8), 9, "logits", True, 1.0, None, torch.int64)


def test_messages_open_with_the_op():
    raises(ValueError, "topk_renorm: expected 'k'", moe_mlir.topk_renorm, Z(4, 8), 9)


@pytest.mark.parametrize(
    "error,message,args",
    [
        (
            ValueError,
            "expected 'weight' to have shape [experts, d of 'h'] = (3, 8)",
            (Z(4, 8), Z(3, 7)),
        ),
        (ValueError, "expected 'weight' to have 2 dims", (Z(4, 8), Z(8))),
        (ValueError, "expected 'bias' to have shape", (Z(4, 8), Z(3, 8), Z(4))),
        (TypeError, "expected 'h' to have dtype", (Z(4, 8).long(), Z(3, 8))),
        (TypeError, "expected 'weight' to be a tensor, found NoneType", (Z(4, 8), None)),
    ],
)
def test_router_logits(error, message, args):
    raises(error, message, moe_mlir.router_logits, *args)


U, E = Z(2, 5, 6), Z(2, 5, 4)
SIMILARITY = [
    (ValueError, "expected 'probs' to have shape [.., keys, experts] = (2, 5, 4), found (2, 4, 4)",
     (U, Z(2, 4, 4)), {}),
    (ValueError, "expected 'probs' to have dims [.., tokens, width], as many as 'h'", (U, Z(5, 4)), {}),
    (TypeError, "expected 'keys' to have the dtype of 'h' (float32), found bfloat16",
     (U, E), dict(keys=U.bfloat16())),
    (ValueError, "expected 'keys' to have shape [.., keys, d of 'h'] (no 'weight' was given)",
     (U, E), dict(keys=Z(2, 5, 7))),
    (ValueError, "expected 'weight' to have shape", (U, E), dict(weight=Z(6, 7))),
    (ValueError, "expected 'mask' to have shape [.., keys] = (2, 5)", (U, E), dict(mask=Z(2, 6).bool())),
    (ValueError, "expected 'tau' to be positive and finite, found 0.0", (U, E), dict(tau=0)),
    (ValueError, "expected 'tau' to be a number or a 0-d floating tensor", (U, E), dict(tau=Z(1))),
    (ValueError, "expected 'window' to be at least 1, found 0", (U, E), dict(window=0)),
    (ValueError, "expected 'restrict' to be one of 'all', 'entropy'", (U, E), dict(restrict="none")),
    (ValueError, "expected no 'keys' with restrict='entropy'", (U, E), dict(keys=U, restrict="entropy")),
    (ValueError, "expected 'precision' to be one of 'ieee', 'tf32'", (U, E), dict(precision="bf16")),
]  # fmt: skip


@pytest.mark.parametrize("error,message,args,kwargs", SIMILARITY)
def test_similarity_inform(error, message, args, kwargs):
    raises(error, message, moe_mlir.similarity_inform, *args, causal=True, **kwargs)


def test_causality_has_no_default():
    raises(TypeError, "causal", moe_mlir.similarity_inform, U, E)
    raises(TypeError, "causal", moe_mlir.attention_posterior, U, U, U, E)


POSTERIOR = [
    (ValueError, "expected either 'projected_v' or both 'v' and 'wo', found none", dict(projected_v=None)),
    (
        ValueError,
        "expected either 'projected_v' or both 'v' and 'wo', found vp and v",
        dict(v=Z(2, 3, 5, 4)),
    ),
    (
        ValueError,
        "expected either 'projected_v' or both 'v' and 'wo', found v",
        dict(projected_v=None, v=Z(2, 3, 5, 4)),
    ),
    (ValueError, "expected 'projected_v' to have shape", dict(projected_v=Z(2, 3, 5, 7))),
    (ValueError, "expected 'wo' to have shape", dict(projected_v=None, v=Z(2, 3, 5, 4), wo=Z(3, 4, 6))),
    (ValueError, "expected 'k' to have shape", dict(k=Z(2, 2, 5, 4))),
    (TypeError, "expected 'k' to have the dtype of 'q'", dict(k=Z(2, 3, 5, 4).half())),
    (ValueError, "expected 'q' to have 4 dims", dict(q=Z(3, 5, 4))),
    (ValueError, "expected 'attn_output' to have shape", dict(attn_output=Z(2, 6, 6))),
    (ValueError, "expected 'probs' to have shape", dict(probs=Z(2, 6, 4))),
    (
        ValueError,
        "expected 'bias' to have shape [batch or 1, heads or 1, n, nk]",
        dict(bias=Z(2, 5, 5)),
    ),
    (ValueError, "expected 'head_prior' to have shape", dict(head_prior=Z(2, 3, 5))),
    (ValueError, "expected 'mask' to have shape", dict(mask=Z(2, 3).bool())),
    (ValueError, "expected 'sigma' to be positive", dict(sigma=-1.0)),
    (
        ValueError,
        "expected 'head_mode' in [0, 3) (the number of heads), found 3",
        dict(head_mode=3),
    ),
    (ValueError, "expected 'head_mode' to be one of", dict(head_mode="max")),
    (ValueError, "expected 'head_scope' to be one of", dict(head_scope="token")),
    (ValueError, "expected 'window' to be at least 1", dict(window=-1)),
    (
        ValueError,
        "expected 'row_lse' and 'row_entropy' together, found one of them",
        dict(row_entropy=Z(2, 3, 5)),
    ),
    (
        ValueError,
        "expected 'row_lse' to have shape [batch, heads, n]",
        dict(row_lse=Z(2, 5, 3), row_entropy=Z(2, 3, 5)),
    ),
    (
        TypeError,
        "expected 'row_entropy' to have dtype float32",
        dict(row_lse=Z(2, 3, 5), row_entropy=Z(2, 3, 5).half()),
    ),
]


@pytest.mark.parametrize("error,message,changed", POSTERIOR)
def test_attention_posterior(error, message, changed):
    x = dict(q=Z(2, 3, 5, 4), k=Z(2, 3, 5, 4), attn_output=Z(2, 5, 6), probs=Z(2, 5, 4), projected_v=Z(2, 3, 5, 6))
    raises(error, message, moe_mlir.attention_posterior, causal=True, **{**x, **changed})


@pytest.mark.parametrize(
    "error,message,args,kwargs",
    [
        (ValueError, "expected 'assign' to have shape", (Z(4, 6), Z(5).int(), 3), {}),
        (TypeError, "expected 'assign' to have dtype int32 or int64", (Z(4, 6), Z(4), 3), {}),
        (ValueError, "expected 'num_experts' to be at least 1", (Z(4, 6), Z(4).int(), 0), {}),
        (
            ValueError,
            "expected 'measure' to be one of",
            (Z(4, 6), Z(4).int(), 3),
            dict(measure="std"),
        ),
    ],
)
def test_mad_dispersion(error, message, args, kwargs):
    raises(error, message, moe_mlir.mad_dispersion, *args, **kwargs)


@pytest.mark.parametrize(
    "error,message,args,kwargs",
    [
        (ValueError, "expected 'adjacency' to have shape", (Z(4, 6), Z(6, 5)), {}),
        (TypeError, "expected 'adjacency' to have dtype float32", (Z(4, 6), Z(6, 6).half()), {}),
        (TypeError, "expected 'probs' to have dtype", (Z(4, 6).double(), Z(6, 6)), {}),
        (
            ValueError,
            "expected 'cold_start' to be one of",
            (Z(4, 6), Z(6, 6)),
            dict(cold_start="eye"),
        ),
    ],
)
def test_adjacency_gate(error, message, args, kwargs):
    raises(error, message, moe_mlir.adjacency_gate, *args, **kwargs)


@pytest.mark.parametrize(
    "error,message,kwargs",
    [
        (ValueError, "expected 'adjacency' to have shape", dict(adjacency=Z(6, 5))),
        (TypeError, "expected 'indices' to have dtype", dict(indices=Z(4, 2))),
        (ValueError, "expected 'beta' in [0, 1], found 1.5", dict(beta=1.5)),
        (ValueError, "expected 'norm' to be one of", dict(norm="max")),
        (
            ValueError,
            "expected 'diagonal' to be True with norm='eq7'",
            dict(norm="eq7", diagonal=False),
        ),
        (ValueError, "expected 'mask' to have shape", dict(mask=Z(4, 2).bool())),
    ],
)
def test_adjacency_update(error, message, kwargs):
    raises(
        error,
        message,
        moe_mlir.adjacency_update,
        **{**dict(adjacency=Z(6, 6), indices=Z(4, 2).int()), **kwargs},
    )


def test_unknown_names_of_the_package():
    with pytest.raises(AttributeError, match="no attribute 'topk'"):
        _ = moe_mlir.topk
