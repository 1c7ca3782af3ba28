"""Gradients of the ops against float64 autograd through the reference."""

import math

import pytest
import torch
from op_judge import assert_close, gradient_tolerance, random, score_tolerance
from test_attention_posterior import FORMS
from torch.utils._python_dispatch import TorchDispatchMode

import moe_mlir
from moe_mlir import reference
from moe_mlir.ops import _posterior_backward, _similarity_backward

# Operands that are constants of their op even if they require a gradient.
CONSTANT = {"a"}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random(seed))


def check(op, logit=10.0, **operands):
    """Every floating operand's gradient, for random cotangents of every floating result."""
    leaves = [
        name
        for name, value in operands.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in CONSTANT
    ]

    def run(function, dtype):
        arguments = dict(operands)
        for name in leaves:
            arguments[name] = operands[name].detach().clone().to(dtype).requires_grad_()
        results = function(**arguments)
        results = results if isinstance(results, tuple) else (results,)
        loss = 0
        for position, result in enumerate(r for r in results if r.requires_grad):
            cotangent = normal(*result.shape, seed=100 + position).to(dtype)
            # Rows without support have an infinite log-sum-exp and no gradient.
            used = torch.where(result.isfinite(), result, 0.0)
            loss = loss + (used * cotangent).sum()
        loss.backward()
        return {name: arguments[name].grad for name in leaves}

    actual = run(getattr(moe_mlir, op), torch.float32)
    expected = run(getattr(reference, op), torch.float64)
    for name in leaves:
        wanted = expected[name]
        if wanted is None:  # the operand took no part, such as a head prior with one head
            wanted = torch.zeros_like(actual[name], dtype=torch.float64)
        tol = gradient_tolerance(score_tolerance(logit), wanted)
        assert_close(actual[name], wanted, tol, f"d{name}")


@pytest.mark.parametrize("kind", ("logits", "probs"))
@pytest.mark.parametrize("renorm", (True, False))
def test_topk_renorm(kind, renorm):
    scores = normal(3, 20, 16)
    scores = scores.softmax(-1) if kind == "probs" else scores
    mask = torch.rand(3, 20, generator=random(1)) > 0.3
    check("topk_renorm", scores=scores, k=4, kind=kind, renorm=renorm)
    check("topk_renorm", scores=scores, k=4, kind=kind, renorm=renorm, mask=mask, route_scale=2.5)


def test_topk_renorm_zero_sum_has_no_gradient():
    p = torch.zeros(4, 6, requires_grad=True)
    gates, _ = moe_mlir.topk_renorm(p, 2, kind="probs")
    gates.sum().backward()
    assert not p.grad.any()


def test_topk_renorm_keeps_no_dense_scores_for_renormalised_logits():
    """softmax(TopK(z)) needs only its own result in the backward."""
    z = normal(50, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        kept = []
        moe_mlir.topk_renorm(z, 2)
    assert sum(kept) == 2 * 50 * 2


def test_router_logits():
    check("router_logits", h=normal(3, 7, 13), weight=normal(5, 13, seed=1), bias=normal(5, seed=2))


def tokens(n, *, nk=None, width=12, key_width=12, experts=5):
    nk = n if nk is None else nk
    return dict(
        u=normal(2, n, width),
        e=normal(2, nk, experts, seed=1).softmax(-1),
        uk=normal(2, nk, key_width, seed=2),
        ws=0.3 * normal(width, key_width, seed=3),
        mask=torch.rand(2, nk, generator=random(4)) > 0.3,
    )


def without(operands, *names):
    return {name: value for name, value in operands.items() if name not in names}


def test_similarity_inform_between_tokens():
    x = without(tokens(150), "uk", "ws", "mask")
    check("similarity_inform", causal=True, **x)
    check("similarity_inform", causal=False, restrict="entropy", **x)


def test_similarity_inform_with_everything():
    x = tokens(150, nk=170, key_width=7)
    check("similarity_inform", causal=True, window=40, tau=torch.tensor(1.3), **x)
    square = without(tokens(40), "uk")
    check("similarity_inform", causal=False, tau=torch.tensor(0.8), **square)


def heads(n, *, means):
    x = dict(
        q=normal(2, 3, n, 6),
        k=normal(2, 3, n, 6, seed=1),
        u=normal(2, n, 10, seed=2),
        e=normal(2, n, 5, seed=3).softmax(-1),
    )
    if means:
        x["vp"] = normal(2, 3, n, 10, seed=4)
    else:
        x["v"], x["wo"] = normal(2, 3, n, 6, seed=4), 0.4 * normal(3, 10, 6, seed=5)
    return x


# The forms of the forward tests, whose kernels are compiled already.
@pytest.mark.parametrize("mode,means,causal", FORMS)
def test_attention_posterior(mode, means, causal):
    x = heads(140, means=means)
    check("attention_posterior", logit=40, causal=causal, head_mode=mode, **x)


@pytest.mark.parametrize("mode,shape", [("min_entropy", (2, 3, 30, 30)), ("all", (30, 30))])
def test_attention_posterior_with_bias_mask_and_sigma(mode, shape):
    check(
        "attention_posterior",
        logit=40,
        causal=True,
        head_mode=mode,
        bias=normal(*shape, seed=6),
        mask=torch.rand(2, 30, generator=random(7)) > 0.3,
        sigma=torch.tensor(1.4),
        exclude_self=True,
        window=12,
        **heads(30, means=False),
    )


def test_attention_posterior_head_prior():
    prior = torch.rand(2, 30, 3, generator=random(8)) + 0.1
    x = heads(30, means=False)
    check("attention_posterior", logit=40, causal=True, head_mode="all", head_prior=prior, **x)


def test_adjacency_gate():
    p, a = normal(9, 7).softmax(-1), torch.rand(7, 7, generator=random(1))
    check("adjacency_gate", p=p, a=a, threshold=0.3)
    check("adjacency_gate", p=p, a=torch.zeros(7, 7), cold_start="base")


def test_statistics_have_no_gradient():
    h = normal(12, 6).requires_grad_()
    a = torch.rand(4, 4).requires_grad_()
    assign = torch.arange(12) % 4
    assert not any(t.requires_grad for t in moe_mlir.mad_dispersion(h, assign, 4))
    assert not moe_mlir.adjacency_update(a, assign[:, None]).requires_grad
    gate = moe_mlir.adjacency_gate(normal(12, 4).requires_grad_(), a)
    gate.sum().backward()
    assert a.grad is None


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gradients_come_back_in_the_operand_dtype(dtype):
    u, e = normal(1, 9, 12).to(dtype).requires_grad_(), normal(1, 9, 4).softmax(-1).to(dtype)
    p, _ = moe_mlir.similarity_inform(u, e.requires_grad_(), causal=True)
    p.square().sum().backward()
    wide_u, wide_e = (x.detach().double().requires_grad_() for x in (u, e))
    p, _ = reference.similarity_inform(wide_u, wide_e, causal=True)
    p.square().sum().backward()
    eps = torch.finfo(dtype).eps
    for actual, wide in ((u, wide_u), (e, wide_e)):
        assert actual.grad.dtype == dtype
        assert_close(actual.grad, wide.grad, eps * float(wide.grad.abs().max()))


# ---------------------------------------------------------------------- memory


class LargestResult(TorchDispatchMode):
    """Records the most elements that any single torch operation produced."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_backwards_hold_no_token_by_token_matrix():
    n = 512
    u, e = 0.3 * normal(1, n, 12), normal(1, n, 4, seed=1).softmax(-1)
    p, lse = moe_mlir.similarity_inform(u, e, causal=True)
    with LargestResult() as seen:
        _similarity_backward.similarity_backward(
            p, lse * 0, p, lse, u, e, None, None, None, None, 1.0, True, None, "all"
        )
    assert seen.elements <= 128 * n
    x = heads(n, means=False)
    p, head, prior, posterior = moe_mlir.attention_posterior(
        **x, causal=True, head_mode="all", return_lse=True
    )
    q, k, u, e, v, wo = x.values()
    with LargestResult() as seen:
        _posterior_backward.posterior_backward(
            p, p, head, prior, posterior, q, k, u, e, None, v, wo, None, None, None, None,
            1.0, None, "all", True, None, False,
        )  # fmt: skip
    assert seen.elements <= 2 * 3 * 128 * n


def test_large_logits_do_not_overflow():
    u, e = 20 * normal(1, 30, 32), normal(1, 30, 4, seed=1).softmax(-1)
    u.requires_grad_()
    p, _ = moe_mlir.similarity_inform(u, e, causal=True)
    p.square().sum().backward()
    assert math.isfinite(float(u.grad.abs().max()))
