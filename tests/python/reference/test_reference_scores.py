"""Scores in the reference against loops, closed forms and central differences."""

import math

import pytest
import torch
from op_judge import assert_close, random
from torch.autograd import gradcheck

from moe_mlir import reference


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=random(seed))


def norm(x):
    return math.sqrt(sum(a * a for a in x))


# ----------------------------------------------------------------- cosine_logits


@pytest.mark.parametrize("norm_token,norm_emb", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("reduced", [True, False])
def test_cosine_logits_equal_the_loop(norm_token, norm_emb, reduced):
    h, emb = normal(7, 6), normal(5, 4 if reduced else 6, seed=1)
    omega = normal(4, 6, seed=2) if reduced else None
    options = dict(tau=0.3, norm_token=norm_token, norm_emb=norm_emb)
    z = reference.cosine_logits(h, omega, emb, **options)
    for i, token in enumerate(h):
        x = token.tolist() if omega is None else [float(row @ token) for row in omega]
        for j, e in enumerate(emb.tolist()):
            scale = (norm(x) if norm_token else 1) * (norm(e) if norm_emb else 1)
            expected = sum(a * b for a, b in zip(x, e)) / scale / 0.3
            assert abs(float(z[i, j]) - expected) < 1e-12


def test_cosine_logits_of_a_zero_token_are_zero_and_have_a_gradient():
    h, emb = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True), normal(3, 4)
    z = reference.cosine_logits(h, None, emb, eps=1e-4)
    assert not z.any()
    dz = normal(1, 3, seed=1)
    (dh,) = torch.autograd.grad(z, h, dz)
    # dx = dx^ / eps within eps of zero.
    expected = dz @ (emb / emb.norm(dim=-1, keepdim=True)) / 1e-4
    assert_close(dh, expected, 1e-9)


def test_the_token_norm_never_changes_the_selection():
    h, emb = normal(50, 8), normal(9, 8, seed=1)
    a, b = (reference.cosine_logits(h, None, emb, norm_token=n) for n in (True, False))
    assert torch.equal(reference.rank_experts(a), reference.rank_experts(b))


def test_cosine_logits_gradients_follow_the_closed_form():
    h, omega, emb = normal(4, 6), normal(3, 6, seed=1), normal(5, 3, seed=2)
    tau = torch.tensor(0.7, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (h, omega, emb, tau)]
    run = lambda h, omega, emb, tau: reference.cosine_logits(h, omega, emb, tau=tau)  # noqa: E731
    assert gradcheck(run, inputs)
    z, dz = run(*inputs), normal(4, 5, seed=3)
    (dtau,) = torch.autograd.grad(z, tau, dz)
    assert_close(dtau, -(dz * z).sum() / tau, 1e-12)


def test_cosine_logits_c2_eps_must_be_positive():
    with pytest.raises(ValueError, match="expected 'eps' to be positive, found 0"):
        reference.cosine_logits(normal(2, 3), None, normal(4, 3), eps=0.0)


def test_cosine_logits_c1_the_embeddings_have_the_tokens_width():
    with pytest.raises(ValueError, match=r"expected 'emb' to be as wide .* \(3\), found 4"):
        reference.cosine_logits(normal(2, 3), None, normal(4, 4))


def test_cosine_logits_c3_tau_must_be_positive():
    with pytest.raises(ValueError, match="expected 'tau' to be positive, found -1"):
        reference.cosine_logits(normal(2, 3), None, normal(4, 3), tau=-1.0)


# -------------------------------------------------------------- dispersion_weights


def test_dispersion_weights_c1_eps_must_be_positive():
    with pytest.raises(ValueError, match="expected 'eps' to be positive, found 0"):
        reference.dispersion_weights(normal(2, 3).abs(), torch.ones(2), eps=0.0)


def test_dispersion_weights_c2_clamp_must_be_positive():
    with pytest.raises(ValueError, match="expected 'clamp' to be positive, found -1"):
        reference.dispersion_weights(normal(2, 3).abs(), torch.ones(2), clamp=-1.0)


# ------------------------------------------------------------------ hyper_router


def network(experts=5, d=6, hidden=7, width=3):
    return (
        normal(width),
        normal(hidden, width, seed=1),
        normal(hidden, seed=2),
        normal(experts * (d + 1), hidden, seed=3),
        normal(experts * (d + 1), seed=4),
    )


def test_hyper_router_equals_the_loop():
    e, w1, b1, w2, b2 = network()
    weight, bias = reference.hyper_router(e, w1, b1, w2, b2, 5)
    hidden = [max(0.0, float(w1[i] @ e + b1[i])) for i in range(7)]
    for expert in range(5):
        for column in range(7):
            row = expert * 7 + column
            out = sum(float(w2[row, i]) * hidden[i] for i in range(7)) + float(b2[row])
            found = bias[expert] if column == 6 else weight[expert, column]
            assert abs(float(found) - out) < 1e-12


def test_hyper_router_trains_the_embedding_alone():
    e, *frozen = (x.requires_grad_() for x in network())
    weight, bias = reference.hyper_router(e, *frozen, 5)
    grads = torch.autograd.grad(
        weight.sum() + bias.square().sum(), [e, *frozen], allow_unused=True
    )
    assert grads[0] is not None and all(g is None for g in grads[1:])
    assert gradcheck(lambda e: reference.hyper_router(e, *frozen, 5), (e,))


def test_hyper_router_c1_rows_divide_among_the_experts():
    with pytest.raises(ValueError, match=r"'w2' to have num_experts \* \(d \+ 1\) rows"):
        reference.hyper_router(*network(), 4)


# --------------------------------------------------------------------- ac_logits


def test_ac_logits_equal_the_loop_with_a_token_from_nowhere():
    h, m, emb = normal(6, 4), normal(3, 4, seed=1).exp(), normal(5, 4, seed=2)
    prev = torch.tensor([[0, 1], [1, 2], [-1, -1], [2, -1], [0, 2], [1, 0]])
    gates = normal(6, 2, seed=3).softmax(-1) * 0.9
    bias = normal(5, seed=4)
    z = reference.ac_logits(h, m, prev, emb, prev_gates=gates, bias=bias)
    for i in range(6):
        metric, total = torch.zeros(4, dtype=torch.float64), 0.0
        for a in range(2):
            if prev[i, a] >= 0:
                metric = metric + gates[i, a] * m[prev[i, a]]
                total += float(gates[i, a])
        metric = metric / total if total else torch.ones(4, dtype=torch.float64)
        for e in range(5):
            expected = sum(float(h[i, q] * metric[q] * emb[e, q]) for q in range(4))
            assert abs(float(z[i, e]) - expected - float(bias[e])) < 1e-12


def test_ac_logits_gradients_leave_the_metric_alone():
    h, m, emb = normal(6, 4), normal(3, 4, seed=1).exp(), normal(5, 4, seed=2)
    prev = torch.arange(6)[:, None] % 3
    for x in (h, m, emb):
        x.requires_grad_()
    assert gradcheck(lambda h, emb: reference.ac_logits(h, m, prev, emb), (h, emb))
    z = reference.ac_logits(h, m, prev, emb)
    assert torch.autograd.grad(z.sum(), m, allow_unused=True) == (None,)


def test_ac_logits_c1_a_mixture_needs_gates():
    with pytest.raises(ValueError, match="expected 'prev_gates'"):
        reference.ac_logits(
            normal(2, 4), normal(3, 4), torch.zeros(2, 2, dtype=torch.int64), normal(5, 4)
        )
