"""The ops around a router inside a compiled model: import, compile, run against eager."""

import pytest
import torch

import moe_mlir


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def check(function, *inputs):
    """Compiled results equal the ops' own; returns the module's text."""
    model = Function(function).eval()
    module = moe_mlir.export(model, inputs)
    with torch.no_grad():
        expected = model(*inputs)
        found = moe_mlir.compile(module)(*inputs)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    return module.text


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_grouped_selection_dispatch_and_combine():
    def layer(z, bias, x, mask):
        gates, idx = moe_mlir.grouped_topk(
            z, 2, bias=bias, n_group=4, topk_group=2, route_scale=2.5, mask=mask
        )
        slots, offsets, counts = moe_mlir.dispatch(idx, 8, capacity=3, mask=mask)
        y = moe_mlir.combine(x, gates, slots, shared=x[:1].expand(10, -1))
        new = moe_mlir.bias_update(bias, counts)
        return y, slots, offsets, moe_mlir.densify(gates, idx, 8), new

    text = check(layer, torch.randn(10, 8), torch.randn(8), torch.randn(20, 12), torch.rand(10) > 0.2)
    for op in ("topk_renorm", "dispatch", "combine", "densify", "bias_update"):
        assert f"moe.{op} " in text, op


def test_capacity_factor_priority_gates_and_map():
    def places(idx, priority, gates, expert_map):
        a = moe_mlir.dispatch(idx, 8, capacity_factor=1.25, priority=priority)
        b = moe_mlir.dispatch(idx, 8, capacity=2, gates=gates, alignment=4)
        c = moe_mlir.dispatch(idx, 3, expert_map=expert_map)
        return a[0], b[0], b[1], c[0], c[2]

    idx = torch.rand(2, 5, 8).argsort(-1)[..., :2]
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1, -1, -1], dtype=torch.int32)
    check(places, idx, torch.rand(2, 5), torch.rand(2, 5, 2), expert_map)


def test_thresholds_losses_and_soft_slots():
    def router(z, x, phi, theta, scale, mask):
        p = moe_mlir.make_finite(z, scope="tensor").softmax(-1)
        gates, count = moe_mlir.threshold_renorm(p, theta, mask=mask)
        _, idx = moe_mlir.topk_renorm(z, 2, mask=mask)
        to_slots, to_tokens = moe_mlir.soft_dispatch(x, phi, scale=scale, mask=mask)
        balance = moe_mlir.balance_loss(p, idx, mask=mask, divide_by="assignments")
        return gates, count, to_slots, to_tokens, balance, moe_mlir.z_loss(z, mask=mask)

    check(
        router, torch.randn(2, 6, 8), torch.randn(2, 6, 12), torch.randn(12, 4, 2),
        torch.tensor(0.1), torch.tensor(3.0), torch.rand(2, 6) > 0.2,
    )  # fmt: skip
