"""moe_mlir.inductor_pass: routers raised in Inductor's own graphs."""

import pytest
import torch
import torch.nn.functional as F

import moe_mlir
from moe_mlir.frontends.inductor import RoutingPass

E = 8
BIAS = torch.linspace(0.2, -0.1, E)


def renormalised(z):
    values, indices = F.softmax(z, -1).topk(2)
    return values / values.sum(-1, keepdim=True), indices


def late_softmax(z):
    values, indices = z.topk(2)
    return F.softmax(values, 1), indices


def grouped(z):
    scores = z.sigmoid()
    choice = scores + BIAS
    groups = choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(-1).topk(2, dim=-1)[1]
    mask = torch.zeros(z.shape[0], 4).scatter_(1, groups, 1).unsqueeze(-1)
    mask = mask.expand(-1, 4, E // 4).reshape(-1, E).bool()
    indices = choice.masked_fill(~mask, float("-inf")).topk(2)[1]
    gates = scores.gather(1, indices)
    return gates / (gates.sum(-1, keepdim=True) + 1e-20) * 2.5, indices


def dense(z):
    values, indices = z.topk(2, dim=1)
    return torch.full_like(z, float("-inf")).scatter_(1, indices, values).sigmoid(), indices


def switch(z):
    probabilities = F.softmax(z, -1)
    return probabilities.max(-1).values, probabilities.argmax(-1)


@pytest.fixture
def raised(monkeypatch):
    """The selection ops in each graph that the pass has seen."""
    torch._dynamo.reset()
    seen = []

    class Spy(RoutingPass):
        def __call__(self, graph):
            super().__call__(graph)
            seen.append([str(n.target) for n in graph.nodes if "moe." in str(n.target)])
    monkeypatch.setattr("moe_mlir.frontends.inductor.RoutingPass", Spy)
    return seen


@pytest.mark.parametrize("select, op", [
    (renormalised, "topk_renorm"), (late_softmax, "topk_renorm"), (grouped, "grouped_topk"),
    (dense, "grouped_topk"), (switch, "topk_renorm")])
def test_inductor_graphs_are_raised(select, op, raised):
    z = torch.randn(6, E, generator=torch.Generator().manual_seed(0))
    with moe_mlir.inductor_pass(), torch.no_grad(), \
            torch._inductor.config.patch(fx_graph_cache=False):
        ours = torch.compile(select, fullgraph=True)(z)
    for found, expected in zip(ours, select(z)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert [sum(op in name for name in names) for names in raised] == [1]


def test_the_pass_has_an_id_and_refuses_company():
    assert RoutingPass().uuid() == RoutingPass().uuid()
    with torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None):
        with pytest.raises(RuntimeError, match="expected no custom post-grad pass of Inductor"):
            with moe_mlir.inductor_pass():
                pass


def test_the_pass_is_gone_afterwards():
    before = torch._inductor.config.post_grad_custom_post_pass
    with moe_mlir.inductor_pass():
        assert isinstance(torch._inductor.config.post_grad_custom_post_pass, RoutingPass)
    assert torch._inductor.config.post_grad_custom_post_pass is before
