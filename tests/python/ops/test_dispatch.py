"""moe.dispatch and moe.combine on the CPU against the references; integers are exact."""

import math

import pytest
import torch
from op_judge import DTYPES, assert_close, gradient_tolerance, random, strided, unaligned

import moe_mlir
from moe_mlir import reference


def choices(n, experts, k, seed=0):
    return torch.rand(n, experts, generator=random(seed)).argsort(-1)[:, :k]


def check(idx, experts, **options):
    results = moe_mlir.dispatch(idx, experts, **options)
    expected = reference.dispatch(idx, experts, **options)
    for name, actual, wanted in zip(("slots", "offsets", "counts"), results, expected, strict=True):
        assert actual.dtype == torch.int64
        assert torch.equal(actual, wanted), f"{name}: {actual} != {wanted}"
    return results


@pytest.mark.parametrize("experts,k", [(1, 1), (2, 2), (8, 2), (16, 8), (257, 3)])
def test_equals_reference_for_any_experts_and_k(experts, k):
    for n in (0, 1, 2, 7, 100):
        idx = choices(n, experts, k, seed=n)
        check(idx, experts)
        check(idx.int(), experts, capacity=max(1, n * k // (2 * experts)))


def test_order_inside_an_expert_is_first_choices_in_token_order_then_second():
    idx = torch.tensor([[0, 1], [1, 0], [0, 1]])
    slots, offsets, counts = check(idx, 2)
    assert slots.tolist() == [[0, 4], [3, 2], [1, 5]]
    assert offsets.tolist() == [0, 3, 6] and counts.tolist() == [3, 3]


@pytest.mark.parametrize("capacity", (0, 1, 3, 50, 10**9))
def test_capacity_keeps_the_first(capacity):
    idx = choices(40, 6, 2)
    slots, _, counts = check(idx, 6, capacity=capacity)
    assert int(counts.max()) <= capacity
    assert int((slots >= 0).sum()) == int(counts.sum())


@pytest.mark.parametrize("capacity", (None, 1, 5))
def test_priority_reorders_the_tokens(capacity):
    idx = choices(60, 6, 3)
    priority = torch.randn(60, generator=random(1))
    check(idx, 6, priority=priority, capacity=capacity)


def test_priorities_have_a_total_order():
    """Ties by token, -0 equal to +0, NaN last (E1, E2, E3)."""
    priority = torch.tensor([0.0, math.nan, -0.0, math.inf, -math.inf, 1.0, math.nan, 0.0])
    slots, _, _ = check(torch.zeros(8, 1, dtype=torch.int64), 1, priority=priority)
    order = slots[:, 0].argsort().tolist()
    assert order == [3, 5, 0, 2, 7, 4, 1, 6]


def test_e10_masked_tokens_and_indices_out_of_range_have_no_slot():
    idx = choices(30, 6, 2)
    idx[::4, 1] = -1
    mask = torch.rand(30, generator=random(1)) > 0.3
    slots, _, _ = check(idx, 6, mask=mask, capacity=4)
    assert (slots[~mask] == -1).all() and (slots[::4, 1] == -1).all()
    wild = idx.clone()
    wild[3, 0], wild[5, 0] = 6, 2**40
    wild_as_none = idx.clone()
    wild_as_none[3, 0] = wild_as_none[5, 0] = -1
    for a, b in zip(moe_mlir.dispatch(wild, 6), moe_mlir.dispatch(wild_as_none, 6), strict=True):
        assert torch.equal(a, b)


def test_leading_dims_and_layouts():
    idx = choices(24, 6, 2)
    whole = check(idx, 6, capacity=5)
    for other in (idx.view(2, 3, 4, 2), strided(idx), unaligned(idx)):
        for a, b in zip(whole, moe_mlir.dispatch(other, 6, capacity=5), strict=True):
            assert torch.equal(a, b.view(a.shape))


@pytest.mark.parametrize("factor", (0.5, 1.0, 1.25, 2.0))
def test_capacity_factor_is_tutels_rule(factor):
    for n, k in ((40, 2), (41, 3), (0, 2)):
        idx = choices(n, 6, k, seed=n)
        capacity = k * int(factor * -(-n // 6))
        results = moe_mlir.dispatch(idx, 6, capacity_factor=factor)
        for a, b in zip(results, reference.dispatch(idx, 6, capacity=capacity), strict=True):
            assert torch.equal(a, b)


def test_f14_probs_keep_the_highest_gates():
    """By loops: each expert sorts its assignments by gate and keeps the first ones."""
    idx, capacity = choices(50, 5, 2), 7
    gates = torch.rand(50, 2, generator=random(2))
    gates[::7] = 0.5  # ties, which go to first choices and lower tokens
    slots, offsets, counts = moe_mlir.dispatch(idx, 5, gates=gates, capacity=capacity)
    for expert in range(5):
        asked = [(a, t) for a in range(2) for t in range(50) if int(idx[t, a]) == expert]
        by_gate = sorted(asked, key=lambda at: -float(gates[at[1], at[0]]))[:capacity]
        start = int(offsets[expert])
        for row, (a, t) in enumerate(at for at in asked if at in by_gate):
            assert int(slots[t, a]) == start + row
        assert int(counts[expert]) == len(by_gate)
    kept = sum(min(capacity, int((idx == e).sum())) for e in range(5))
    assert int((slots >= 0).sum()) == kept


def test_f9_expert_map_is_a_shard_filter_and_a_remap():
    idx = choices(40, 8, 2)
    # Logical experts 2, 3, 6 live here as 1, 0, 2.
    expert_map = torch.tensor([-1, -1, 1, 0, -1, -1, 2, -1], dtype=torch.int32)
    results = moe_mlir.dispatch(idx, 3, expert_map=expert_map, capacity=6)
    local = expert_map.long()[idx]
    for a, b in zip(results, reference.dispatch(local, 3, capacity=6), strict=True):
        assert torch.equal(a, b)


def test_f8_alignment_pads_the_offsets():
    idx = choices(40, 6, 2)
    slots, offsets, counts = moe_mlir.dispatch(idx, 6, alignment=16)
    padded = (counts + 15) // 16 * 16
    assert torch.equal(offsets[1:], padded.cumsum(0)) and int(offsets[0]) == 0
    plain, starts, same = moe_mlir.dispatch(idx, 6)
    assert torch.equal(counts, same)
    assert torch.equal(slots - offsets[idx], plain - starts[idx])


# --------------------------------------------------------------------- combine


def rows_of(idx, experts, width, dtype=torch.float32, **options):
    slots, offsets, _ = moe_mlir.dispatch(idx, experts, **options)
    out = torch.randn(int(offsets[-1]), width, generator=random(3)).to(dtype)
    gates = torch.rand(idx.shape, generator=random(4))
    return out, gates, slots


@pytest.mark.parametrize("width,k", [(1, 2), (7, 1), (8, 5), (33, 2), (64, 1), (100, 3)])
def test_combine_equals_reference(width, k):
    for n in (0, 1, 3, 70):
        out, gates, slots = rows_of(choices(n, 6, k), 6, width, capacity=20)
        y = moe_mlir.combine(out, gates, slots)
        assert_close(y, reference.combine(out.double(), gates.double(), slots), 1e-5)
        if width == 33:
            assert torch.equal(moe_mlir.combine(out, gates, slots.int()), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_rounds_once(dtype):
    out, gates, slots = rows_of(choices(40, 6, 3), 6, 33, dtype)
    shared = torch.randn(40, 33, generator=random(5)).to(dtype)
    y = moe_mlir.combine(out, gates, slots, shared=shared)
    wanted = reference.combine(out.double(), gates.double(), slots) + shared.double()
    assert y.dtype == dtype
    assert_close(y, wanted, 1e-5 + torch.finfo(dtype).eps * float(wanted.abs().max()))


def test_combine_does_not_read_what_has_no_slot():
    out, gates, slots = rows_of(choices(9, 4, 2), 4, 12)
    gates[2, 1], slots[2, 1] = math.nan, -1
    slots[5, 0] = out.shape[0] + 7
    y = moe_mlir.combine(out, gates, slots)
    assert y.isfinite().all()
    expected = gates[5, 1] * out[slots[5, 1]]
    assert_close(y[5], expected.double(), 1e-6)
    nothing = moe_mlir.combine(out[:0], gates, torch.full_like(slots, -1))
    assert nothing.shape == (9, 12) and not nothing.any()


def test_combine_leading_dims():
    out, gates, slots = rows_of(choices(24, 6, 2), 6, 10)
    y = moe_mlir.combine(out, gates.view(2, 12, 2), slots.view(2, 12, 2))
    assert torch.equal(y.view(24, 10), moe_mlir.combine(out, gates, slots))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_combine_gradient(dtype):
    out, gates, slots = rows_of(choices(30, 6, 2), 6, 12, dtype, capacity=7)
    shared = torch.randn(30, 12, generator=random(5)).to(dtype)
    cotangent = torch.randn(30, 12, generator=random(6)).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (out, gates, shared)]
    moe_mlir.combine(leaves[0], leaves[1], slots, shared=leaves[2]).backward(cotangent)
    wide = [x.detach().double().requires_grad_() for x in (out, gates, shared)]
    y = reference.combine(wide[0], wide[1], slots) + wide[2]
    y.backward(cotangent.double())
    for leaf, wanted in zip(leaves, wide, strict=True):
        eps = 0.0 if leaf.dtype == torch.float32 else torch.finfo(dtype).eps
        tol = gradient_tolerance(1e-6, wanted.grad) + eps * float(wanted.grad.abs().max())
        assert_close(leaf.grad, wanted.grad, tol)


def test_combine_gradient_of_shared_rows_adds_up():
    """Slots need not come from dispatch: two assignments may read one row."""
    out = torch.ones(2, 3, requires_grad=True)
    y = moe_mlir.combine(out, torch.tensor([[0.25, 0.5], [1.0, 2.0]]), torch.tensor([[0, 0], [1, 0]]))
    y.sum().backward()
    assert out.grad.tolist() == [[2.75] * 3, [1.0] * 3]
