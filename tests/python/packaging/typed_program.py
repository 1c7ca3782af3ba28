"""A program of a user who checks types strictly. Nothing runs it: mypy reads it, by
utils/check_format.sh, under the rules of pyproject.toml for the public interface."""

from typing import assert_type

import torch

import moe_mlir
from moe_mlir import metrics, nn, reference


def route(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gates, indices = moe_mlir.topk_renorm(scores, 8, kind="logits", renorm=True)
    exact, _ = reference.topk_renorm(scores.double(), 8)
    slots, offsets, counts = moe_mlir.dispatch(indices, 64, capacity=4)
    return moe_mlir.combine(exact, gates, slots), counts + offsets[1:]


def train(h: torch.Tensor, targets: torch.Tensor) -> float:
    router = nn.SymphonySMoE(
        16, 8, 2, base=nn.XMoE(16, 8, 2, tau=0.3), device="cpu", dtype=torch.bfloat16
    )
    layer = nn.MoELayer(router, 32, shared=1, dtype=torch.bfloat16)
    y, routing = layer.forward(h)
    assert_type(routing, nn.Routing)
    loss = (y - targets).square().mean()
    if routing.probs is not None:
        loss = loss + moe_mlir.balance_loss(routing.probs, routing.indices)
    loss.backward()
    moe_mlir.update_routers(layer)
    monitor = metrics.RoutingMonitor(layer)
    monitor.end_window()
    return float(loss)


def refusals(model: torch.nn.Module, x: torch.Tensor) -> list[str]:
    sites = moe_mlir.explain(model, (x,))
    assert_type(sites, list[moe_mlir.RouterMatch])
    return [f"{site.module}: {site.reason}" for site in sites if not site.recognised]


def deploy(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    module = moe_mlir.export(model, (x,))
    module.save("model.mlir")
    compiled = moe_mlir.compile(model, (x,))
    try:
        return moe_mlir.load("model.artifact")(x)
    except moe_mlir.MoeError:
        return compiled(x)


class Steep(nn.LinearRouter):
    """A router of one's own."""

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return 2 * super().logits(h)
