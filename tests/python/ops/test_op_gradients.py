"""Gradients of the ops against float64 autograd through the reference."""

import math

import pytest
import torch
from op_judge import (
    assert_close,
    assert_same_bits,
    gradient_tolerance,
    random,
    score_tolerance,
)
from test_attention_posterior import FORMS

import moe_mlir
from moe_mlir import reference

# Operands that are constants of their op even if they require a gradient.
CONSTANT = {"adjacency"}


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
        h=normal(2, n, width),
        probs=normal(2, nk, experts, seed=1).softmax(-1),
        keys=normal(2, nk, key_width, seed=2),
        weight=0.3 * normal(width, key_width, seed=3),
        mask=torch.rand(2, nk, generator=random(4)) > 0.3,
    )


def without(operands, *names):
    return {name: value for name, value in operands.items() if name not in names}


def test_similarity_inform_between_tokens():
    x = without(tokens(150), "keys", "weight", "mask")
    check("similarity_inform", causal=True, **x)
    check("similarity_inform", causal=False, restrict="entropy", **x)


def test_similarity_inform_with_everything():
    x = tokens(150, nk=170, key_width=7)
    check("similarity_inform", causal=True, window=40, tau=torch.tensor(1.3), **x)
    square = without(tokens(40), "keys")
    check("similarity_inform", causal=False, tau=torch.tensor(0.8), **square)


def test_a_loss_may_read_one_result_of_similarity_inform():
    u, e = normal(1, 7, 6), normal(1, 7, 3, seed=1).softmax(-1)
    wide = [x.double().requires_grad_() for x in (u, e)]
    mine = [x.requires_grad_() for x in (u, e)]
    for place in (0, 1):
        found, exact = (
            torch.autograd.grad(op(*x, causal=True)[place].square().sum(), x, allow_unused=True)
            for op, x in (
                (moe_mlir.similarity_inform, mine), (reference.similarity_inform, wide))
        )  # fmt: skip
        for a, b in zip(found, exact, strict=True):
            assert_close(a, torch.zeros_like(a) if b is None else b, 1e-4, "gradient")


def heads(n, *, means):
    x = dict(
        q=normal(2, 3, n, 6),
        k=normal(2, 3, n, 6, seed=1),
        attn_output=normal(2, n, 10, seed=2),
        probs=normal(2, n, 5, seed=3).softmax(-1),
    )
    if means:
        x["projected_v"] = normal(2, 3, n, 10, seed=4)
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


@pytest.mark.parametrize("mode", ["min_entropy", "all"])
def test_attention_posterior_with_a_mask_of_its_queries(mode):
    masks = torch.rand(2, 2, 30, generator=random(7)) > 0.3
    check(
        "attention_posterior",
        logit=40,
        causal=True,
        head_mode=mode,
        mask=masks[0],
        query_mask=masks[1],
        **heads(30, means=False),
    )


def test_attention_posterior_head_prior():
    prior = torch.rand(2, 30, 3, generator=random(8)) + 0.1
    x = heads(30, means=False)
    check("attention_posterior", logit=40, causal=True, head_mode="all", head_prior=prior, **x)


def test_adjacency_gate():
    p, a = normal(9, 7).softmax(-1), torch.rand(7, 7, generator=random(1))
    check("adjacency_gate", probs=p, adjacency=a, threshold=0.3)
    check("adjacency_gate", probs=p, adjacency=torch.zeros(7, 7), cold_start="base")


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


# ----------------------------------------------------------------------- edges


@pytest.mark.parametrize("n", (0, 1))
def test_no_tokens_and_one_token(n):
    """E12, E13: no token has no gradient; a token that sees only itself mixes a constant."""
    x = without(tokens(n), "keys", "mask")
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    p, _ = moe_mlir.similarity_inform(**leaves, causal=True)
    p.sum().backward()
    assert leaves["h"].grad.shape == x["h"].shape
    for name in ("h", "weight"):
        assert_close(leaves[name].grad, torch.zeros_like(x[name]).double(), 1e-6, name)
    assert_close(leaves["probs"].grad, torch.ones_like(x["probs"]).double(), 1e-6, "probs")
    leaves = {name: value.requires_grad_() for name, value in heads(n, means=False).items()}
    p, _ = moe_mlir.attention_posterior(**leaves, causal=True, head_mode="all")
    p.sum().backward()
    assert_close(leaves["probs"].grad, torch.ones_like(leaves["probs"]).double(), 1e-6, "probs")
    assert all(bool(x.grad.isfinite().all()) for x in leaves.values())


def test_all_masked_tokens_have_no_gradient():
    x = without(tokens(20), "keys")
    x["mask"] = torch.zeros(2, 20, dtype=torch.bool)
    for name in ("h", "probs", "weight"):
        x[name].requires_grad_()
    p, _ = moe_mlir.similarity_inform(**x, causal=True)
    p.sum().backward()
    assert not any(x[name].grad.any() for name in ("h", "probs", "weight"))


def with_garbage(x, mask, dim):
    """x with NaN in the masked tokens, which lie along `dim`."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = mask.shape
    return torch.where(mask.view(shape), x, math.nan)


@pytest.mark.parametrize("mode", ("min_entropy", "all"))
def test_garbage_in_padding_does_not_leak(mode):
    """E11: NaN in masked tokens, and in the cotangents of their rows, changes no gradient."""
    mask = torch.rand(2, 70, generator=random(3)) > 0.3

    def grads(op, operands, garbage):
        leaves = {
            name: (with_garbage(x, mask, dim) if garbage and dim else x).clone().requires_grad_()
            for name, (x, dim) in operands.items()
        }
        options = dict(head_mode=mode, sigma=leaves.pop("sigma")) if "q" in leaves else {}
        tau = dict(tau=leaves.pop("tau")) if "tau" in leaves else {}
        p = op(**leaves, **options, **tau, causal=True, mask=mask)[0]
        dp = normal(*p.shape, seed=9)
        p.backward(with_garbage(dp, mask, 1) if garbage else dp)
        return {name: x.grad for name, x in (leaves | options | tau).items() if name != "head_mode"}

    x = tokens(70)
    similarity = dict(
        h=(x["h"], 1), probs=(x["probs"], 1), weight=(x["weight"], None), tau=(torch.tensor(1.2), None)
    )
    dims = dict(q=2, k=2, attn_output=1, probs=1, v=2, wo=None, sigma=None)
    operands = heads(70, means=False) | dict(sigma=torch.tensor(1.1))
    posterior = {name: (value, dims[name]) for name, value in operands.items()}
    for op, operands in (
        (moe_mlir.similarity_inform, similarity),
        (moe_mlir.attention_posterior, posterior),
    ):
        clean, dirty = (grads(op, operands, garbage) for garbage in (False, True))
        for name, expected in clean.items():
            assert torch.equal(dirty[name], expected), name


def test_queries_that_see_no_key():
    """The first query of a causal layer that excludes itself."""
    check(
        "attention_posterior", logit=40, causal=True, exclude_self=True, head_mode="all",
        **heads(9, means=True),
    )  # fmt: skip


def test_cached_keys_and_a_window():
    x = without(tokens(70, nk=133, width=13), "weight")
    x["keys"] = normal(2, 133, 13, seed=2)
    check("similarity_inform", causal=True, window=31, **x)
    q = heads(133, means=True)
    q["q"], q["attn_output"] = q["q"][:, :, 63:].contiguous(), q["attn_output"][:, 63:].contiguous()
    check("attention_posterior", logit=40, causal=True, window=31, head_mode="all", **q)


@pytest.mark.parametrize("shape", [(2, 1, 20, 20), (1, 3, 20, 20), (1, 1, 20, 20), (2, 3, 20, 20)])
@pytest.mark.parametrize("mode", ("min_entropy", "all"))
def test_every_form_of_bias(mode, shape):
    x = heads(20, means=True)
    check("attention_posterior", logit=40, causal=True, head_mode=mode, bias=normal(*shape), **x)


@pytest.mark.parametrize("kind", ("logits", "probs"))
@pytest.mark.parametrize("renorm", (True, False))
@pytest.mark.parametrize("experts,k", [(1, 1), (5, 5), (33, 2), (257, 8)])
def test_selection_sizes(experts, k, renorm, kind):
    if k == 1 and renorm:
        pytest.skip("a renormalised gate of one expert is a constant")
    scores = normal(11, experts)
    scores = scores.softmax(-1) if kind == "probs" else scores
    check("topk_renorm", scores=scores, k=k, kind=kind, renorm=renorm, route_scale=0.5)


def test_selection_of_tied_and_hidden_experts():
    z = normal(30, 12).mul(2).round()
    z[::3, 5:] = -math.inf
    z[7] = -math.inf
    for renorm in (True, False):
        grads = []
        for function, dtype in (
            (moe_mlir.topk_renorm, torch.float32),
            (reference.topk_renorm, torch.float64),
        ):
            x = z.clone().to(dtype).requires_grad_()
            gates, _ = function(x, 6, renorm=renorm)
            gates.backward(normal(30, 6).to(dtype))
            grads.append(x.grad)
        wanted = grads[1].nan_to_num(0.0)
        assert_close(grads[0], wanted, gradient_tolerance(1e-6, wanted))


def test_a_backward_through_a_backward_is_refused():
    z = normal(4, 6).requires_grad_()
    gates, _ = moe_mlir.topk_renorm(z, 2)
    (dz,) = torch.autograd.grad(gates.square().sum(), z, create_graph=True)
    with pytest.raises(NotImplementedError, match="expected gradients of first order"):
        dz.sum().backward()


@pytest.mark.parametrize("threads", (1, 2))
def test_gradients_do_not_depend_on_threads_or_batch(threads):
    """Bit-equal: every sum has a fixed order."""

    def grads(batch, number):
        before = torch.get_num_threads()
        torch.set_num_threads(number)
        x = {name: value[:batch] for name, value in heads(200, means=False).items() if name != "wo"}
        leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
        wo = 0.4 * normal(3, 10, 6, seed=5)
        p, _ = moe_mlir.attention_posterior(**leaves, wo=wo, causal=True, head_mode="all")
        p.backward(normal(2, 200, 5, seed=8)[:batch])
        torch.set_num_threads(before)
        return leaves

    whole, alone = grads(2, 2), grads(1, threads)
    for name, leaf in alone.items():
        assert_same_bits(whole[name].grad[:1], leaf.grad, name)


def test_large_logits_do_not_overflow():
    u, e = 20 * normal(1, 30, 32), normal(1, 30, 4, seed=1).softmax(-1)
    u.requires_grad_()
    p, _ = moe_mlir.similarity_inform(u, e, causal=True)
    p.square().sum().backward()
    assert math.isfinite(float(u.grad.abs().max()))
