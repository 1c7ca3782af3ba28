"""Top-ks among tokens, of which explain says nothing, and those that look alike."""

import pytest
import torch
import torch.nn.functional as F

import moe_mlir
from moe_mlir.raising import find_routers


class Indexes(torch.nn.Module):
    """Attention to the keys of the largest scores; `score` makes these of queries and keys."""

    def __init__(self, score):
        super().__init__()
        self.wq, self.wk, self.w = (torch.nn.Parameter(torch.randn(16, n)) for n in (16, 16, 8))
        self.score = score

    def forward(self, x):
        return self.score(self, x).topk(3, dim=-1)[1]


def keys(self, x):
    return F.relu((x @ self.wq).unsqueeze(1) @ (x @ self.wk).transpose(-1, -2).unsqueeze(1)).squeeze(1)


def heads(self, x):
    weights = torch.ones(*x.shape[:2], 1, 1)
    return (weights @ keys(self, x).unsqueeze(2)).squeeze(-2).masked_fill(x.sum(-1)[:, None] > 9, -torch.inf)


def experts_of_a_weight(self, x):
    return (x @ self.w).tanh()


def experts_of_a_transposed_weight(self, x):
    return torch.matmul(x, self.wq.t())


def experts_of_similar_tokens(self, x):
    return F.relu(x @ x.transpose(-1, -2)) @ (x @ self.w)


@pytest.mark.parametrize("score, listed", [
    (keys, 0), (heads, 0), (experts_of_a_weight, 1), (experts_of_a_transposed_weight, 1),
    (experts_of_similar_tokens, 1)])
def test_a_selection_among_tokens_is_no_router_that_was_missed(score, listed):
    x = torch.randn(2, 5, 16)
    assert len(moe_mlir.explain(Indexes(score), (x,))) == listed
    # As a graph of fixed sizes, in which a number of tokens looks like one of experts.
    program = torch.export.export(Indexes(score), (x,))
    assert len(find_routers(program.graph)) == listed
