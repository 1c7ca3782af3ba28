"""The papers' routers in plain torch, as somebody writes them who knows no moe op."""

import pytest
import torch
import torch.nn.functional as F

import moe_mlir
from moe_mlir.frontends import dynamo

B, N, D, E, K, H = 2, 6, 16, 8, 2, 4


class Similarity(torch.nn.Module):
    """Mutual-Inform, similarity: tokens that are alike route alike."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(D, E)

    def forward(self, x):
        similarity = F.softmax(x @ x.transpose(-2, -1) / 4.0, dim=-1)
        scores = similarity @ F.softmax(self.gate(x), dim=-1)
        weights, experts = scores.topk(K, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), experts


class Einsum(Similarity):
    def forward(self, x):
        similarity = torch.einsum("bid,bjd->bij", x, x).div(4.0).softmax(-1)
        scores = torch.einsum("bij,bje->bie", similarity, self.gate(x).softmax(-1))
        weights, experts = torch.topk(scores, K)
        weights /= weights.sum(-1, keepdim=True)
        return weights, experts


class Causal(Similarity):
    """A language model's: a matrix of its own, a learned temperature, no later tokens."""

    def __init__(self):
        super().__init__()
        self.ws = torch.nn.Parameter(torch.randn(D, D) / D)
        self.tau = torch.nn.Parameter(torch.tensor(2.0))

    def logits(self, x):
        return x @ self.ws @ x.transpose(-2, -1) / self.tau

    def mask(self, n):
        return torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)

    def forward(self, x):
        logits = self.logits(x).masked_fill(self.mask(x.shape[1]), float("-inf"))
        scores = F.softmax(logits, dim=-1) @ F.softmax(self.gate(x), dim=-1)
        weights, experts = scores.topk(K, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), experts


class Keys(Causal):
    """Keys of their own, and the triangle written the other way round."""

    def logits(self, x):
        return 0.5 * (x @ torch.tanh(x @ self.ws).mT)

    def mask(self, n):
        return torch.tril(torch.ones(n, n)) == 0


class LooksAhead(Causal):
    """A triangle, but a token sees the next one."""

    def mask(self, n):
        return torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=2)


class Narrow(Similarity):
    """The model rounds the similarities to bf16."""

    def forward(self, x):
        similarity = F.softmax(x.bfloat16() @ x.bfloat16().mT, dim=-1).float()
        scores = similarity @ F.softmax(self.gate(x), dim=-1)
        weights, experts = scores.topk(K, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), experts


class Attention(torch.nn.Module):
    """Mutual-Inform, attention: the posterior of the most certain head mixes decisions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate = torch.nn.Linear(D, 3 * D), torch.nn.Linear(D, E)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
        prior = F.softmax(q @ k.transpose(-2, -1) / (D // H) ** 0.5, dim=-1)
        distance = (q.unsqueeze(3) - v.unsqueeze(2)).square().sum(-1)
        posterior = prior * torch.exp(-distance / 2)
        posterior = posterior / posterior.sum(dim=-1, keepdim=True)
        entropy = -(prior * prior.log()).sum(-1).mean(dim=(0, 2))
        head = posterior.index_select(1, entropy.argmin().view(1)).squeeze(1)
        scores = head @ F.softmax(self.gate(x), dim=-1)
        weights, experts = scores.topk(K, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), experts


class Clusters(torch.nn.Module):
    """ACMoE: features in which a token's cluster is tight count more."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(E, D))

    def forward(self, x):
        tokens = x.view(-1, D)
        previous = (tokens @ self.weight.t()).argmax(-1)
        members = F.one_hot(previous, E).to(x.dtype)
        counts = members.sum(0).clamp(min=1).unsqueeze(-1)
        centers = members.t() @ tokens / counts
        spread = members.t() @ (tokens - centers[previous]).abs() / counts
        scale = 1 / (spread + 1e-2)
        logits = (tokens * scale[previous]) @ self.weight.t()
        weights, experts = logits.topk(K, dim=-1)
        return weights.softmax(dim=-1), experts


class Symphony(torch.nn.Module):
    """SymphonySMoE: experts that were chosen together are chosen together."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(D, E, bias=False)
        self.register_buffer("adjacency", torch.rand(E, E))

    def forward(self, x):
        return (F.softmax(self.gate(x), dim=-1) @ self.adjacency).topk(K, dim=-1)


class Hyper(torch.nn.Module):
    """HyperRouter: a frozen network writes the router's weights."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.randn(D))
        self.network = torch.nn.Sequential(torch.nn.Linear(D, 32), torch.nn.ReLU(),
                                           torch.nn.Linear(32, E * (D + 1)))

    def forward(self, x):
        weights = self.network(self.embedding).view(E, D + 1)
        logits = F.linear(x, weights[:, :-1], weights[:, -1])
        return F.softmax(logits, dim=-1).topk(K, dim=-1)


ROUTERS = {Similarity: "P1", Einsum: "P1", Causal: "P1", Keys: "P1", LooksAhead: "P1", Narrow: "P1",
           Attention: "P1", Clusters: "F2", Symphony: "P3", Hyper: "F3"}
MIXED = (Similarity, Einsum, Causal, Keys)


@pytest.fixture(params=ROUTERS, ids=lambda router: router.__name__)
def router(request):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return request.param()


@pytest.mark.drawn(4)
def test_plain_routers_are_recognised_and_compiled(router):
    x = torch.randn(B, N, D)
    matches = [m for m in moe_mlir.explain(router, (x,)) if m.k == K]
    assert [m.form for m in matches] == [ROUTERS[type(router)]] and matches[0].recognised
    assert matches[0].mixing == ("similarity" if type(router) in MIXED else "")
    compiled = moe_mlir.compile(router, (x,))
    for ours, eager in zip(compiled(x), router(x)):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def test_plain_routers_train_on_moe_ops(router):
    seen, x = [], torch.randn(B, N, D)

    def spy(module, inputs):
        raised = dynamo._raise_before_autograd(module)
        seen.extend(str(n.target) for n in raised.graph.nodes if "moe." in str(n.target))
        return dynamo.moe(module, inputs, options={"rest": "eager"})
    results = []
    for run in (router, torch.compile(router, backend=spy, fullgraph=True)):
        router.zero_grad()
        weights, experts = run(x)
        (weights * torch.arange(1.0, K + 1)).sum().backward()
        results.append((weights.detach(), experts, *(p.grad.clone() for p in router.parameters()
                                                     if p.grad is not None)))
    assert sum("topk" in name for name in seen) == 1
    assert sum("similarity" in name for name in seen) == (type(router) in MIXED)
    for ours, eager in zip(*results):
        torch.testing.assert_close(eager, ours, rtol=1e-4, atol=1e-5)
