"""Sorts of experts' ids: counted where the ids are a selection's, else left alone."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import moe_mlir
from moe_mlir.raising.sorted_ids import raise_sorted_ids

E, K, N = 6, 3, 7


def select(z):
    return torch.ops.moe.topk_renorm(z, K, "logits", True, 1.0, None, torch.int64)[1]


def by_sort(z):
    return select(z).flatten().sort(0)[1]


def by_stable_sort(z):
    return select(z).reshape(-1).sort(stable=True)[1]


def descending(z):
    return select(z).flatten().sort(0, descending=True)[1]


def with_values(z):
    values, order = select(z).flatten().sort(0)
    return order + values


def by_token(z):
    return select(z).sort(-1)[1]


def of_masked(z):
    mask = z[:, 0] > 0
    return torch.ops.moe.topk_renorm(z, K, "logits", True, 1.0, mask, torch.int64)[1].flatten().sort(0)[1]


def of_other_numbers(z):
    return (select(z) * 2).flatten().sort(0)[1]


def traced(function):
    z = torch.randn(N, E, generator=torch.Generator().manual_seed(0))
    return z, make_fx(function, tracing_mode="fake", pre_dispatch=True,
                   _allow_non_fake_inputs=True)(z)


@pytest.mark.parametrize("function", [by_sort, by_stable_sort])
def test_ids_of_a_selection_are_counted(function):
    z, graph = traced(function)
    assert raise_sorted_ids(graph.graph) == 1
    graph.recompile()
    assert "sort" not in graph.code
    expected = select(z).flatten().sort(stable=True)[1]
    assert torch.equal(graph(z), expected)


@pytest.mark.parametrize("function", [descending, with_values, by_token, of_masked, of_other_numbers])
def test_other_sorts_stay(function):
    _, graph = traced(function)
    assert raise_sorted_ids(graph.graph) == 0 and "sort" in graph.code


def test_ids_that_are_given_may_be_no_experts():
    ids = torch.randint(0, E, (N, K), generator=torch.Generator().manual_seed(1))
    _, graph = traced(lambda z: moe_mlir.grouped_topk(z, K, forced=ids)[1].flatten().sort(0)[1])
    assert raise_sorted_ids(graph.graph) == 0
