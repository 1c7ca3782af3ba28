"""The contract's six routing metrics, against their definitions."""

import math

import pytest
import torch
from op_judge import random

from moe_mlir import metrics


def choose(n, experts, k, seed=0):
    return torch.rand(n, experts, generator=random(seed)).argsort(-1)[:, :k]


def test_fluctuation_compares_sets_not_orders():
    a = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 2]])
    b = torch.tensor([[1, 0], [2, 4], [4, 5], [3, 2]])
    assert float(metrics.fluctuation_rate(a, b)) == 0.5
    mask = torch.tensor([True, True, False, False])
    assert float(metrics.fluctuation_rate(a, b, mask=mask)) == 0.5
    assert float(metrics.fluctuation_rate(a, a)) == 0.0


def test_entropies():
    uniform, sure = torch.full((5, 16), 1 / 16), torch.eye(16)[:5]
    assert float(metrics.routing_entropy(uniform)) == pytest.approx(math.log(16))
    assert float(metrics.routing_entropy(sure)) == 0.0
    assert float(metrics.entropy_ratio(sure, uniform)) == 0.0
    assert float(metrics.entropy_ratio(uniform, uniform)) == 1.0
    assert float(metrics.entropy_ratio(uniform, sure)) == 0.0


def test_load_balance_is_the_population_deviation_of_percentages():
    idx = torch.tensor([[0, 1], [0, 1], [0, 2], [0, -1]])
    counts = torch.tensor([4.0, 2.0, 1.0, 0.0])
    expected = (100 * counts / 7).std(correction=0)
    assert float(metrics.load_balance_std(idx, 4)) == pytest.approx(float(expected))
    assert metrics.selection_counts(idx, 4).tolist() == [4, 2, 1, 0]


def test_instability_is_the_mean_over_all_pairs():
    prev, cur = choose(40, 5, 1)[:, 0], choose(40, 5, 1, seed=1)[:, 0]
    same = lambda top: (top[:, None] == top[None, :]).double()  # noqa: E731
    pairs = (same(prev) - same(cur)).abs().mean()
    assert float(metrics.router_instability(prev, cur)) == pytest.approx(float(pairs))
    mask = torch.rand(40, generator=random(2)) > 0.4
    some = (same(prev[mask]) - same(cur[mask])).abs().mean()
    assert float(metrics.router_instability(prev, cur, mask=mask)) == pytest.approx(float(some))


def test_no_tokens_give_zero():
    none, p = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 4)
    mask, idx = torch.zeros(3, dtype=torch.bool), choose(3, 4, 2)
    assert float(metrics.fluctuation_rate(none, none)) == 0
    assert float(metrics.routing_entropy(p)) == 0
    assert float(metrics.entropy_ratio(p, p)) == 0
    assert float(metrics.load_balance_std(none, 4)) == 0
    assert float(metrics.router_instability(none[:, 0], none[:, 0])) == 0
    assert float(metrics.fluctuation_rate(idx, idx, mask=mask)) == 0
    assert float(metrics.load_balance_std(idx, 4, mask=mask)) == 0
    assert metrics.selection_counts(idx, 4, mask=mask).tolist() == [0] * 4


def test_different_token_counts_are_refused():
    with pytest.raises(ValueError, match="expected 'indices_b' to have the shape"):
        metrics.fluctuation_rate(choose(3, 4, 2), choose(4, 4, 2))
    with pytest.raises(ValueError, match="expected 'top1_cur' to have as many tokens"):
        metrics.router_instability(choose(3, 4, 1), choose(4, 4, 1))
