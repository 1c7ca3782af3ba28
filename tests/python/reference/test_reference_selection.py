"""Selection in the reference against loops over Python floats; tests named after the rules."""

import math

import pytest
import torch
from op_judge import assert_close, assert_legal_selection, random
from torch.autograd import gradcheck

from moe_mlir import reference

INF, NAN = math.inf, math.nan


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=random(seed))


def descending(values):
    """Indices by value descending, then index: E1."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


# ------------------------------------------------------------------ grouped_topk

SCORES = {
    "softmax": lambda row: [math.exp(x) / sum(map(math.exp, row)) for x in row],
    "sigmoid": lambda row: [1 / (1 + math.exp(-x)) for x in row],
    "sqrtsoftplus": lambda row: [math.sqrt(math.log1p(math.exp(x))) for x in row],
    "none": list,
}


def grouped_loop(row, k, bias, score, n_group, topk_group, best, renorm, eps, scale):
    """Steps 1 to 5 of docs/Spec.md 9.1 on one row."""
    s = SCORES[score](row)
    c = [a + b for a, b in zip(s, bias)]
    size = len(row) // n_group
    value = [sum(sorted(c[g * size : (g + 1) * size])[-best:]) for g in range(n_group)]
    kept = descending(value)[:topk_group]
    c = [x if i // size in kept else -INF for i, x in enumerate(c)]
    chosen = descending(c)[:k]
    v = [s[i] for i in chosen]
    total = sum(v) + eps if renorm else 1.0
    return [scale * x / total for x in v], chosen


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("n_group,topk_group,best", [(1, 1, 2), (4, 2, 2), (4, 3, 1), (12, 5, 2)])
@pytest.mark.parametrize("renorm,eps", [(True, 0.0), (True, 1e-3), (False, 0.0)])
def test_grouped_topk_equals_the_loop(score, n_group, topk_group, best, renorm, eps):
    x, bias, k = normal(20, 12), 0.3 * normal(12, seed=1), 4
    x = x.exp() if score == "none" else x
    gates, indices = reference.grouped_topk(
        x, k, bias=bias, score=score, n_group=n_group, topk_group=topk_group,
        group_score="top2" if best == 2 else "max", renorm=renorm, eps=eps, route_scale=2.5,
    )  # fmt: skip
    for i, row in enumerate(x.tolist()):
        expected, chosen = grouped_loop(
            row, k, bias.tolist(), score, n_group, topk_group, best, renorm, eps, 2.5
        )
        assert indices[i].tolist() == chosen
        assert_close(gates[i], torch.tensor(expected, dtype=torch.float64), 1e-13)


def test_grouped_topk_is_topk_renorm_on_logits():
    z = normal(30, 17)
    gates, indices = reference.grouped_topk(z, 5, score="softmax")
    expected, order = reference.topk_renorm(z, 5)
    assert torch.equal(indices, order)
    assert_close(gates, expected, 1e-15)


def test_grouped_topk_trap7_a_dropped_group_loses_to_negative_choices():
    """Dropped groups are at -inf: zeros there would win against the kept -0.4 and -0.3."""
    x = torch.tensor([[-0.1, -0.4, -3.0, -3.0]], dtype=torch.float64)
    _, indices = reference.grouped_topk(x, 2, score="none", n_group=2, topk_group=1)
    assert indices.tolist() == [[0, 1]]
    bias = torch.full((4,), -2.0, dtype=torch.float64)
    _, indices = reference.grouped_topk(x, 2, bias=bias, n_group=2, topk_group=1)
    assert indices.tolist() == [[0, 1]]


def test_grouped_topk_trap8_the_weight_is_the_unbiased_score():
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    bias = torch.tensor([1e17, 0.0, 0.0], dtype=torch.float64)
    gates, indices = reference.grouped_topk(x, 1, bias=bias, renorm=False)
    assert indices.tolist() == [[0]]
    assert_close(gates, x[:, :1].sigmoid(), 1e-16)


def test_grouped_topk_ranks_saturated_scores_by_the_operand():
    x = torch.tensor([[40.0, 50.0, 60.0, 1000.0]], dtype=torch.float64)
    _, indices = reference.grouped_topk(x, 4)
    assert indices.tolist() == [[3, 2, 1, 0]]


def test_grouped_topk_e7_underflowing_sigmoids_still_have_a_ratio():
    x = torch.tensor([[-900.0, -901.0, -5000.0]], dtype=torch.float64)
    gates, _ = reference.grouped_topk(x, 2)
    assert_close(gates, x[:, :2].softmax(-1), 1e-15)


def test_grouped_topk_e1_ties_of_groups_and_experts_go_to_the_lower_index():
    x = torch.zeros(3, 12, dtype=torch.float64)
    _, indices = reference.grouped_topk(x, 4, n_group=4, topk_group=2, bias=torch.zeros(12))
    assert indices.tolist() == [[0, 1, 2, 3]] * 3


def test_grouped_topk_e3_e5_e6():
    x = torch.tensor(
        [[1.0, NAN, 2.0], [-INF, 0.0, -INF], [-INF, -INF, -INF]], dtype=torch.float64
    )
    gates, indices = reference.grouped_topk(x, 2, score="softmax")
    assert gates[0].isnan().all() and indices[0].tolist() == [2, 0]
    assert gates[1].tolist() == [1.0, 0.0] and indices[1].tolist() == [1, 0]
    assert gates[2].tolist() == [0.0, 0.0] and indices[2].tolist() == [0, 1]


def test_grouped_topk_e8_refuses_impossible_sizes():
    x = normal(2, 12)
    for k in (0, 13):
        with pytest.raises(ValueError, match=r"expected 'k' in \[1, 12\]"):
            reference.grouped_topk(x, k)
    with pytest.raises(ValueError, match="'n_group' to divide"):
        reference.grouped_topk(x, 2, n_group=5)
    with pytest.raises(ValueError, match=r"'topk_group' in \[1, 3\]"):
        reference.grouped_topk(x, 2, n_group=3, topk_group=4)
    with pytest.raises(ValueError, match="'k' to be at most 4"):
        reference.grouped_topk(x, 5, n_group=3, topk_group=1)
    with pytest.raises(ValueError, match="expected 'k'"):
        reference.topk_renorm(x, 13)


def test_grouped_topk_e10_masked_and_invalid_tokens_go_nowhere():
    x = normal(2, 3, 8)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    gates, indices = reference.grouped_topk(x, 2, mask=mask, num_valid=torch.tensor(5))
    nowhere = torch.tensor([[False, True, False], [False, False, True]])
    assert bool((indices[nowhere] == -1).all()) and not gates[nowhere].any()
    assert bool((indices[~nowhere] >= 0).all())


def test_grouped_topk_replays_forced_ids_with_gradients():
    x = normal(6, 8)
    _, ids = reference.grouped_topk(x, 3)
    again, same = reference.grouped_topk(x, 3, forced=ids)
    assert torch.equal(ids, same)
    assert_close(again, reference.grouped_topk(x, 3)[0], 0.0)
    ids[0, 1] = -1
    gates, indices = reference.grouped_topk(x, 3, forced=ids)
    assert indices[0, 1] == -1 and gates[0, 1] == 0
    assert_close(gates[0].sum(), torch.ones((), dtype=torch.float64), 1e-15)
    x.requires_grad_()
    assert gradcheck(lambda x: reference.grouped_topk(x, 3, forced=ids)[0], (x,))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus", "none"])
@pytest.mark.parametrize("renorm", [True, False])
def test_grouped_topk_gradients(score, renorm):
    x = normal(5, 8).exp().requires_grad_()
    options = dict(score=score, renorm=renorm, bias=0.1 * normal(8, seed=1), route_scale=1.5)
    assert gradcheck(lambda x: reference.grouped_topk(x, 3, **options)[0], (x,))


# -------------------------------------------------------------- threshold_renorm


@pytest.mark.parametrize("renorm", [True, False])
def test_threshold_equals_the_loop(renorm):
    p, theta = normal(40, 9).softmax(-1), 0.12
    gates, count = reference.threshold_renorm(p, theta, renorm=renorm)
    for i, row in enumerate(p.tolist()):
        chosen = [j for j, x in enumerate(row) if x > theta] or descending(row)[:1]
        total = sum(row[j] for j in chosen) if renorm else 1.0
        expected = [row[j] / total if j in chosen else 0.0 for j in range(9)]
        assert_close(gates[i], torch.tensor(expected, dtype=torch.float64), 1e-15)
        assert int(count[i]) == len(chosen)


def test_threshold_e20_equal_is_not_selected_and_nothing_falls_back_to_the_top_1():
    p = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.25], [0.0, 0.0, 0.0]])
    gates, count = reference.threshold_renorm(p.double(), 0.25)
    assert gates.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert count.tolist() == [1, 1, 1]


def test_threshold_selects_all_sixteen_of_a_uniform_token():
    p = torch.full((1, 16), 1 / 16, dtype=torch.float64)
    gates, count = reference.threshold_renorm(p, 0.05)
    assert_close(gates, p, 1e-16)
    assert count.tolist() == [16]


def test_threshold_e3_e10():
    p = torch.tensor([[0.5, NAN, 0.5], [0.2, 0.3, 0.5]], dtype=torch.float64)
    gates, count = reference.threshold_renorm(p, 0.05, mask=torch.tensor([True, False]))
    assert gates[0].isnan().all() and not gates[1].any() and count[1] == 0
    one_more = p.detach()[1:].requires_grad_()
    assert gradcheck(lambda p: reference.threshold_renorm(p, 0.25)[0], (one_more,))


# ------------------------------------------------------------ densify, make_finite


def test_densify_equals_the_loop_and_drops_nowhere():
    gates, indices = normal(7, 3), normal(7, 9).argsort(-1)[:, :3]
    indices[2] = -1
    dense = reference.densify(gates, indices, 9)
    expected = torch.zeros(7, 9, dtype=torch.float64)
    for i in range(7):
        for a in range(3):
            if indices[i, a] >= 0:
                expected[i, indices[i, a]] = gates[i, a]
    assert torch.equal(dense, expected)
    assert gradcheck(lambda g: reference.densify(g, indices, 9), (gates.requires_grad_(),))


def test_make_finite_takes_the_least_finite_score():
    z = torch.tensor([[1.0, NAN, INF], [-INF, 5.0, 3.0], [NAN, INF, -INF]], dtype=torch.float64)
    row = reference.make_finite(z)
    assert row.tolist() == [[1, 1, 1], [3, 5, 3], [0, 0, 0]]
    tensor = reference.make_finite(z, scope="tensor")
    assert tensor.tolist() == [[1, 1, 1], [1, 5, 3], [1, 1, 1]]
    assert reference.make_finite(torch.full((2, 2), NAN), scope="tensor").tolist() == [[0, 0]] * 2
    with pytest.raises(ValueError, match="expected 'scope'"):
        reference.make_finite(z, scope="batch")


def test_selections_of_no_token_are_empty_e12():
    gates, indices = reference.grouped_topk(normal(0, 8), 3)
    assert gates.shape == indices.shape == (0, 3)
    gates, count = reference.threshold_renorm(normal(0, 8), 0.1)
    assert gates.shape == (0, 8) and count.shape == (0,)
    assert reference.make_finite(normal(0, 8), scope="tensor").shape == (0, 8)
    assert reference.densify(normal(0, 3), torch.zeros(0, 3, dtype=torch.int64), 8).shape == (0, 8)


def test_e9_all_experts_and_a_single_one():
    x = normal(4, 6)
    _, indices = reference.grouped_topk(x, 6, score="softmax")
    assert_legal_selection(indices, x, 0.0)
    gates, indices = reference.grouped_topk(x[:, :1], 1)
    assert gates.tolist() == [[1.0]] * 4 and indices.tolist() == [[0]] * 4
