"""Gradients of the logits ops: float64 autograd, and central differences of the reference."""

import pytest
import torch
from op_judge import random
from test_op_gradients import check as check_all

import moe_mlir
from moe_mlir import reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=random(seed))


@pytest.mark.parametrize("norm_token", (True, False))
@pytest.mark.parametrize("norm_emb", (True, False))
@pytest.mark.parametrize("space", (None, 5))
def test_cosine_logits(norm_token, norm_emb, space):
    x = dict(
        h=normal(3, 7, 13),
        omega=None if space is None else normal(space, 13, seed=1),
        emb=normal(6, 13 if space is None else space, seed=2),
    )
    options = dict(norm_token=norm_token, norm_emb=norm_emb)
    check_all("cosine_logits", **x, **options)
    check_all("cosine_logits", **x, tau=torch.tensor(0.3), **options)


def test_cosine_logits_of_short_vectors():
    """At |x| <= eps the norm is constant."""
    h, emb = normal(6, 13), normal(5, 13, seed=1)
    h[2], emb[3] = 0.0, 1e-6 * emb[3]
    check_all("cosine_logits", h=h, omega=None, emb=emb, eps=1e-3)


def test_hyper_router_trains_the_embedding_only():
    x = [normal(*s, seed=i) for i, s in enumerate(((6,), (9, 6), (9,), (36, 9), (36,)))]
    e, *frozen = (t.requires_grad_() for t in x)
    weight, bias = moe_mlir.hyper_router(e, *frozen, 4)
    (weight * normal(4, 8, seed=7)).sum().add((bias * normal(4, seed=8)).sum()).backward()
    wide = e.detach().double().requires_grad_()
    expected = reference.hyper_router(wide, *(t.detach().double() for t in frozen), 4)
    loss = (expected[0] * normal(4, 8, seed=7)).sum() + (expected[1] * normal(4, seed=8)).sum()
    loss.backward()
    torch.testing.assert_close(e.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    assert all(t.grad is None for t in frozen)


@pytest.mark.parametrize("places", (1, 2, 3))
def test_ac_logits(places):
    idx = torch.randint(-1, 6, (4, 7, places), generator=random(1))
    shares = torch.rand(4, 7, places, generator=random(2))
    shares[0, :3] = 0.0
    h, emb, bias = normal(4, 7, 13), normal(6, 13, seed=3), normal(6, seed=4)
    metric = torch.rand(6, 13, generator=random(5)) + 0.5

    def of(module):
        def run(h, emb, bias):
            gates = None if places == 1 else shares.to(h.dtype)
            m = metric.to(h.dtype)
            return module.ac_logits(h, m, idx, emb, prev_gates=gates, bias=bias)

        return run

    compare(of(moe_mlir), of(reference), h, emb, bias)


def compare(actual, expected, *leaves):
    narrow = [t.clone().requires_grad_() for t in leaves]
    wide = [t.double().requires_grad_() for t in leaves]
    z, w = actual(*narrow), expected(*wide)
    cotangent = normal(*z.shape, seed=9)
    (z * cotangent).sum().backward()
    (w * cotangent.double()).sum().backward()
    for a, b in zip(narrow, wide, strict=True):
        scale = float(b.grad.abs().max())
        assert float((a.grad - b.grad).abs().max()) <= 20 * 2e-6 * scale


def test_metric_and_gates_are_constants():
    m = (torch.rand(6, 13) + 0.5).requires_grad_()
    gates = torch.rand(4, 2).requires_grad_()
    h = normal(4, 13).requires_grad_()
    idx = torch.zeros(4, 2, dtype=torch.int64)
    moe_mlir.ac_logits(h, m, idx, normal(6, 13), prev_gates=gates).sum().backward()
    assert h.grad is not None and m.grad is None and gates.grad is None


def test_statistics_have_no_gradient():
    s = torch.rand(4, 6).requires_grad_()
    assert not moe_mlir.dispersion_weights(s, torch.ones(4, dtype=torch.int64)).requires_grad
    q = normal(1, 2, 5, 4).requires_grad_()
    assert not any(t.requires_grad for t in moe_mlir.attention_entropy(q, q, causal=True))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gradients_come_back_in_the_operand_dtype(dtype):
    h, omega, emb = (normal(*s, seed=i) for i, s in enumerate(((9, 13), (5, 13), (6, 5))))
    leaves = [t.to(dtype).requires_grad_() for t in (h, omega, emb)]
    moe_mlir.cosine_logits(*leaves, tau=0.3).square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    reference.cosine_logits(*wide, tau=0.3).square().sum().backward()
    for a, b in zip(leaves, wide, strict=True):
        assert a.grad.dtype == dtype
        torch.testing.assert_close(
            a.grad.double(), b.grad, rtol=torch.finfo(dtype).eps, atol=1e-2 * float(b.grad.abs().max())
        )


def gradcheck(function, *leaves):
    leaves = [t.double().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-6)


def test_gradcheck_of_the_references():
    """The judge of the gradients above, by central differences."""
    gradcheck(
        lambda h, omega, emb, tau: reference.cosine_logits(h, omega, emb, tau=tau),
        normal(3, 4), normal(2, 4, seed=1), normal(5, 2, seed=2), torch.tensor(0.7),
    )  # fmt: skip
    frozen = [normal(*s, seed=i).double() for i, s in enumerate(((4, 3), (4,), (6, 4), (6,)))]
    gradcheck(lambda e: reference.hyper_router(e, *frozen, 2), normal(3, seed=5))
    idx, gates = torch.tensor([[0, 1], [2, -1], [-1, -1]]), torch.rand(3, 2).double()
    m = torch.rand(3, 4).double() + 0.5
    gradcheck(
        lambda h, emb: reference.ac_logits(h, m, idx, emb, prev_gates=gates),
        normal(3, 4), normal(3, 4, seed=1),
    )  # fmt: skip
