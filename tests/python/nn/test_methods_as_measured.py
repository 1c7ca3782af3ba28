"""What the papers' tables measured, where a default or a mode could say something else."""

import pytest
import torch

from moe_mlir import nn
from moe_mlir.metrics import RoutingMonitor, fluctuation_rate

D, E, K = 16, 8, 2


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("init", ["kaiming", "xavier"])
def test_a_graph_with_negative_entries_is_read_whole(init):
    """P4 Algorithm 1, line 11: g = A softmax(z)."""
    router = nn.SymphonySMoE(D, E, K, init=init).eval()
    assert (router.adjacency < 0).any()
    h = torch.randn(20, D)
    p = router.logits(h).softmax(-1).double()
    expected = (p @ router.adjacency.double().T).topk(K)
    found = router(h)
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.gates.double(), expected.values, rtol=1e-5, atol=1e-6)
    soft = nn.SymphonySoftMoE(D, E, K, init=init)
    assert soft.threshold == router.threshold < 0
    assert nn.SymphonySMoE(D, E, K, init=init, threshold=0.05).threshold == 0.05
    assert nn.SymphonySMoE(D, E, K, cold_start="base").threshold == 0


def test_k_of_a_composed_router_moves_its_base():
    base = nn.SMoE(D, E, K)
    router = nn.SimilaritySMoE(D, E, K, causal=True, base=base)
    router.k = 4
    assert router.k == base.k == 4
    assert router(torch.randn(2, 5, D)).indices.shape[-1] == 4


def padded(batch=3, tokens=8):
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    mask[:, :2] = True
    return torch.randn(batch, tokens, D), mask


def test_fluctuation_leaves_padding_out():
    router, (h, mask) = nn.SMoE(D, E, K).eval(), padded()
    monitor = RoutingMonitor(router)
    monitor.probe(lambda: router(h, mask))
    before = router(h, mask).indices
    with torch.no_grad():
        router.weight.add_(torch.randn_like(router.weight))
    monitor.probe(lambda: router(h, mask))
    expected = fluctuation_rate(before, router(h, mask).indices, mask=mask)
    assert monitor.history()["fluctuation"] == [[float(expected)]] and expected > 0


class Model(torch.nn.Module):
    def __init__(self, router):
        super().__init__()
        self.router, self.norm = router, torch.nn.BatchNorm1d(D)
        self.still = torch.nn.Dropout(0.5)

    def forward(self, h):
        return self.router(self.still(self.norm(h)))


@pytest.mark.parametrize("make", [
    lambda: nn.SymphonySMoE(D, E, K, cold_start="base"), lambda: nn.DeepSeekV3Router(D, E, K),
    lambda: nn.VMoE(D, E, K)])
def test_a_probe_moves_no_state_and_draws_no_noise(make):
    model = Model(make()).train()
    model.still.eval()
    monitor, h = RoutingMonitor(model), torch.randn(20, D)
    model(h)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        monitor.probe(lambda: model(h))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert monitor.history()["fluctuation"] == [[0.0]]
    assert model.training and model.norm.training and not model.still.training


def test_ids_of_padding_are_not_read():
    router, (h, mask) = nn.TwoStageStableMoE(D, E, vocabulary=10), padded()
    tokens = torch.randint(0, 10, mask.shape).masked_fill(~mask, -100)
    other = tokens.masked_fill(~mask, 99)
    first = router(h, mask, tokens=tokens)
    loss = router.distill_loss(tokens, first.indices, mask)
    assert torch.equal(loss, router.distill_loss(other, first.indices, mask))
    loss.backward()
    router.freeze()
    assert torch.equal(router(h, mask, tokens=tokens).indices,
                       router(h, mask, tokens=other).indices)
    nothing = torch.zeros_like(mask)
    assert router.distill_loss(tokens, first.indices, nothing) == 0
