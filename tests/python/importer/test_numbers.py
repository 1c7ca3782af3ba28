"""Tensors without dims, dims without elements, and reductions of what is broadcast."""

import pytest
import torch
import torch.nn.functional as F
from test_operators import Function, check

import moe_mlir

# Calls that take 0 and -1 for dims of a number.
CALLS = [
    lambda s: s.softmax(0), lambda s: s.log_softmax(-1), lambda s: s.cumsum(0), lambda s: s.logcumsumexp(0),
    lambda s: s.max(0), lambda s: s.min(-1), lambda s: s.topk(1), lambda s: s.argmax(0), lambda s: s.cummax(0),
    lambda s: s.sum(-1, keepdim=True), lambda s: s.mean(0), lambda s: s.amax(0), lambda s: s.any(0),
    lambda s: s.norm(dim=0), lambda s: torch.aminmax(s, dim=0), lambda s: s.logsumexp(0),
    lambda s: torch.count_nonzero(s, dim=-1), lambda s: s.gather(0, torch.tensor(0)), lambda s: s.permute(()),
    lambda s: s.scatter_reduce(0, torch.tensor(0), s * 2, "amax"), lambda s: F.softmin(s, 0),
    lambda s: s.index_select(0, torch.tensor([0])), lambda s: s.unsqueeze(0).squeeze(0),
]


def test_a_number_has_a_dim_of_one_element():
    check(lambda s, x: [call(s * x.sum()) for call in CALLS], (torch.tensor(2.0), torch.ones(2, 3)),
          later=(torch.tensor(-3.0), torch.ones(4, 3)))


@pytest.mark.parametrize("call", [
    lambda x: x.amax(0), lambda x: x.max(), lambda x: x.max(0)[0], lambda x: x.argmin(0), lambda x: x.argmax()])
def test_nothing_has_no_extreme(call):
    """As in eager, where each of these raises an error."""
    model = Function(call)
    compiled = moe_mlir.compile(model, (torch.ones(3, 4),))
    for function in (model, compiled):
        with pytest.raises(Exception, match="dim|size"):
            function(torch.ones(0, 4))
    torch.testing.assert_close(compiled(torch.ones(2, 4)), call(torch.ones(2, 4)))


def test_rows_without_tokens_have_no_extremes():
    check(lambda x: (x.amax(-1), x.max(1), x.logsumexp(0)), (torch.randn(3, 4),), later=(torch.randn(0, 4),))


def test_reductions_of_what_is_broadcast_count_it():
    def function(x, y, mask):
        return (F.cosine_similarity(x, y, dim=-2), mask.expand(5, 2, 3).sum(-1), torch.masked.sum(x, -1, mask=mask),
                x.expand(5, 2, 3).amax(0), y.expand(2, 4, 3).prod(1))
    check(function, (torch.randn(1, 2, 3), torch.randn(2, 1, 3), torch.rand(2, 1) > 0.5))
