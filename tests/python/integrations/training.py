"""A small model with experts, its batches, and the plain loop that trainers of others must equal."""

import torch

import moe_mlir
from moe_mlir import nn

D, E, K = 16, 8, 2
STEPS, MICRO = 3, 2


class Model(torch.nn.Module):
    """Two layers of experts; DeepSeek-V3's router counts loads and moves its bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            nn.MoELayer(nn.DeepSeekV3Router(D, E, K, gamma=0.01), 24) for _ in range(2))
        self.head = torch.nn.Linear(D, 4)

    def forward(self, h):
        for layer in self.layers:
            h = h + layer(h)[0]
        return self.head(h)

    @property
    def routers(self):
        return [layer.router for layer in self.layers]


def micro_batches():
    """Those of all optimizer steps, each MICRO of them."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(12, D, generator=generator), torch.randint(4, (12,), generator=generator))
            for _ in range(STEPS * MICRO)]


def loss_of(model, batch):
    h, targets = batch
    return torch.nn.functional.cross_entropy(model(h), targets)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trained_by_hand(compiled=lambda model: model):
    """(the model, the loads that each optimizer step counted)"""
    model, loads = Model(), []
    optimizer, run = optimizer_of(model), compiled(model)
    batches = micro_batches()
    for step in range(STEPS):
        for batch in batches[step * MICRO:(step + 1) * MICRO]:
            (loss_of(run, batch) / MICRO).backward()
        loads.append([router.load.clone() for router in model.routers])
        optimizer.step()
        optimizer.zero_grad()
        moe_mlir.update_routers(model)
    return model, loads


def check_equal(model, loads, wanted, wanted_loads):
    """Weights, biases of the routers, and what each optimizer step counted."""
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=1e-5, atol=1e-7)
    assert all(router.bias.abs().max() > 0 for router in model.routers)
    assert len(loads) == STEPS
    torch.testing.assert_close(loads, wanted_loads)
    assert all(int(load.sum()) == MICRO * 12 * K for step in loads for load in step)
