"""A program of a user who checks types strictly. Nothing runs it: mypy reads it, by
utils/check_format.sh, under the rules of pyproject.toml for the public interface."""

from typing import assert_type

import torch

import moe_mlir
from moe_mlir import distributed, experts, hf, megatron, metrics, nn, onnx, plots, reference, sim


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


def scores(h: torch.Tensor, weight: torch.Tensor, emb: torch.Tensor) -> list[torch.Tensor]:
    z = moe_mlir.router_logits(h, weight, bias=None)
    cosines = moe_mlir.cosine_logits(h, None, emb, tau=0.3, norm_token=True)
    w, b = moe_mlir.hyper_router(emb[0], weight, z[0], weight, z[0], 8)
    finite = moe_mlir.make_finite(z, scope="row")
    dispersion, mean, counts = moe_mlir.mad_dispersion(h, z.argmax(-1), 8, measure="variance")
    metric = moe_mlir.dispersion_weights(dispersion, counts, scale="feature", clamp=2.0)
    ac = moe_mlir.ac_logits(h, metric, z.argmax(-1, keepdim=True), emb, bias=b)
    return [cosines, w, finite, mean, ac]


def select(z: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    gates, indices = moe_mlir.grouped_topk(
        z, 4, score="sigmoid", n_group=4, topk_group=2, group_score="top2_sum", mask=mask)
    moe_mlir.topk_renorm(z, 4, out=(gates, indices))
    dense, count = moe_mlir.threshold_renorm(z.softmax(-1), 0.1)
    loss = moe_mlir.balance_loss(dense, indices, divide_by="tokens") + moe_mlir.z_loss(z)
    bias = moe_mlir.bias_update(z[0], count, gamma=0.01)
    graph = moe_mlir.adjacency_update(z, indices, beta=0.9, norm="row")
    gate = moe_mlir.adjacency_gate(dense, graph, cold_start="base")
    return [moe_mlir.densify(gates, indices, 8), loss, bias, gate]


def mix(h: torch.Tensor, probs: torch.Tensor, q: torch.Tensor, wo: torch.Tensor) -> torch.Tensor:
    similar, _ = moe_mlir.similarity_inform(h, probs, causal=True, restrict="all", tau=0.5)
    out, row_lse, row_entropy = moe_mlir.attention(q, q, q, causal=True, precision="tf32")
    entropy, _ = moe_mlir.attention_entropy(q, q, causal=True)
    posterior, head, *_ = moe_mlir.attention_posterior(
        q, q, h, similar, causal=True, v=out, wo=wo, row_lse=row_lse, row_entropy=row_entropy,
        head_mode=1, head_scope="batch")
    to_slots, to_tokens = moe_mlir.soft_dispatch(h, wo, scale=2.0)
    return posterior + entropy + head + to_slots + to_tokens


def run_layers(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    clamped = experts.ExpertActivation("silu", gate="interleaved", limit=7.0)
    layer = nn.MoELayer(nn.DeepSeekV3Router(16, 8, 2), 32, activation=clamped, bias=True)
    moe_mlir.warm_up(layer, (h,), backward=False)
    y, routing = layer.forward(h)
    y = experts.run_experts(h, routing.gates, routing.indices, w, w, activation="swiglu", out=y)
    y = experts.run_rows(h, routing.gates, routing.indices, 8, lambda rows, offsets: rows)
    spread = distributed.ExpertParallel(layer)
    distributed.share_statistics(spread)
    y = y + distributed.run_experts(h, routing.gates, routing.indices, w, w, num_experts=8)
    counts = distributed.selection_counts(routing.indices, 8, process_group=None)
    distributed.mad_dispersion(h, routing.indices[..., 0], 8)
    distributed.adjacency_update(w[0], routing.indices)
    return y + counts + distributed.load_balance_std(routing.indices, 8)


def measure(indices: torch.Tensor, probs: torch.Tensor, monitor: metrics.RoutingMonitor) -> float:
    found = [metrics.fluctuation_rate(indices, indices), metrics.routing_entropy(probs),
             metrics.entropy_ratio(probs, probs), metrics.load_balance_std(indices, 8),
             metrics.selection_counts(indices, 8), metrics.contingency_table(indices, indices, 8),
             metrics.router_instability(indices, indices)]
    history = monitor.history()
    plots.load(history)
    plots.adjacency(history, windows=2)
    for plot in (plots.fluctuation, plots.instability):
        plot({"a": history})
    plots.entropy_ratio({"a": history}, "a")
    plots.save_all("folder", {"a": history}, baseline="a")
    return float(sum(found, start=torch.zeros(())))


def models(model: torch.nn.Module, x: torch.Tensor) -> int:
    changed: int = moe_mlir.pack_experts(model) + moe_mlir.unpack_experts(model)
    changed += moe_mlir.pack_linears(model) + moe_mlir.unpack_linears(model)
    changed += moe_mlir.quantize(model, "mxfp4", linears=False)
    changed += hf.patch(model) + hf.unpatch(model)
    changed += megatron.patch() + megatron.unpatch()
    gates, chosen = megatron.topk_routing_with_score_function(x, 2, score_function="sigmoid")
    hf.register_experts()
    hf.kernel_mapping()
    moe_mlir.save_pretrained(model, "folder")
    moe_mlir.save_decoder(moe_mlir.from_pretrained("folder"), "decoder", room=128)
    with moe_mlir.inductor_pass():
        same: bool = moe_mlir.compare(model, moe_mlir.compile(model, (x,)), (x,)).ok
    assert same
    return changed + onnx.export(model, (x,), "model.onnx")


def simulated(x: torch.Tensor) -> bool:
    with moe_mlir.simulate(chip="sm_90a", strict=False) as simulation:
        moe_mlir.topk_renorm(x, 2)
    report = sim.launch("kernel.ptx", "scale", 1, (32, 1, 1), [x, 2.0], checks=("race",))
    assert_type(report, sim.Report)
    print(moe_mlir.doctor())
    return report.ok and bool(simulation.reports)
