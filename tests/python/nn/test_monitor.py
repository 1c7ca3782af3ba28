"""RoutingMonitor against the metrics of what the routers returned, and its pictures."""

import pytest
import torch
from methods import D, E, K, normal
from torch.utils._python_dispatch import TorchDispatchMode

import moe_mlir
from moe_mlir import metrics, nn, plots

LAYERS = 3


class Model(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = torch.nn.ModuleList(nn.MoELayer(make(), 6) for _ in range(LAYERS))

    def forward(self, h, mask=None):
        self.routings = []
        for layer in self.layers:
            y, routing = layer(h, mask)
            h = h + y
            self.routings.append(routing)
        return h


def symphony():
    return nn.SymphonySMoE(D, E, K, cold_start="base", impl="torch")


def smoe():
    return nn.SMoE(D, E, K, impl="torch")


def run(make, windows=3, mask=None):
    torch.manual_seed(0)
    model = Model(make)
    monitor = metrics.RoutingMonitor(model)
    seen = []
    for window in range(windows):
        seen.append([])
        for step in range(2):
            model(normal(2, 9, D, seed=10 * window + step), mask)
            seen[-1].append(model.routings)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.3 * normal(*p.shape, seed=window)
        moe_mlir.update_routers(model)
        model.eval()
        monitor.probe(lambda: model(normal(2, 9, D, seed=99)))
        model.train()
        monitor.end_window()
    return model, monitor, seen


MASK = torch.arange(18).reshape(2, 9) % 4 != 0


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("make", [smoe, symphony])
def test_windows_hold_the_metrics_of_all_their_forwards(make, mask):
    _, monitor, seen = run(make, mask=mask)
    history = monitor.history()
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask
    for window, forwards in enumerate(seen):
        for layer in range(LAYERS):
            idx = torch.cat([f[layer].indices for f in forwards])
            expected = float(metrics.load_balance_std(idx, E))
            assert history["load_std"][window][layer] == pytest.approx(expected)
            p = [f[layer].logits.softmax(-1) if make is smoe else f[layer].probs for f in forwards]
            p = torch.cat(p) / torch.cat(p).sum(-1, keepdim=True)
            expected = float(metrics.routing_entropy(p.detach(), mask=torch.cat([real, real])))
            assert history["entropy"][window][layer] == pytest.approx(expected, rel=1e-5)
            if layer:
                before = torch.cat([f[layer - 1].indices for f in forwards])[..., 0]
                expected = float(metrics.router_instability(before, idx[..., 0]))
                assert history["instability"][window][layer] == pytest.approx(expected)
    assert history["instability"][0][0] is None
    assert (history["adjacency"][0][0] is None) == (make is smoe)


def test_probes_give_the_fluctuation_and_leave_the_windows_alone():
    model, monitor, _ = run(smoe)
    probes = [[probe[layer] for layer in range(LAYERS)] for probe in monitor._probes]
    history = monitor.history()["fluctuation"]
    assert len(history) == 2
    for pair, rates in enumerate(history):
        for layer, rate in enumerate(rates):
            a, b = probes[pair][layer], probes[pair + 1][layer]
            assert rate == pytest.approx(float(metrics.fluctuation_rate(a, b)))
    assert max(max(rates) for rates in history) > 0
    before = len(monitor._windows)
    with monitor.paused():
        model(normal(2, 9, D))
    assert not monitor._window and len(monitor._windows) == before


class NoReadBack(TorchDispatchMode):
    """Fails on what makes a device wait for the host's sight of a value."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert name not in self.FORBIDDEN, f"{name} reads back from the device"
        return func(*args, **(kwargs or {}))


def test_collecting_reads_nothing_back_from_the_device():
    torch.manual_seed(0)
    model = Model(symphony)
    router = model.layers[0].router
    routing = router(normal(2, 9, D))
    monitor = metrics.RoutingMonitor(model)
    with NoReadBack():
        for _ in range(2):
            for layer in range(LAYERS):
                monitor._record(layer, router, routing)
        monitor.end_window()
        metrics.routing_entropy(routing.probs, mask=MASK)
        metrics.load_balance_std(routing.indices, E, mask=MASK)
        metrics.fluctuation_rate(routing.indices, routing.indices, mask=MASK)
        top1 = routing.indices[..., 0]
        metrics.router_instability(top1, top1, num_experts=E, mask=MASK)
    with pytest.raises(AssertionError, match="reads back"), NoReadBack():
        float(routing.gates.detach().sum())


def test_closing_takes_the_hooks_off():
    model, monitor, _ = run(smoe, windows=1)
    monitor.close()
    model(normal(2, 9, D))
    assert not monitor._window


def test_pictures_of_every_metric_are_written(tmp_path):
    histories = {"SMoE": run(smoe)[1].history(), "Symphony": run(symphony)[1].history()}
    paths = plots.save_all(tmp_path / "plots", histories, baseline="SMoE")
    assert {p.stem for p in paths} == {
        "fluctuation", "instability", "entropy-ratio", "load-smoe", "load-symphony",
        "adjacency-symphony",
    }  # fmt: skip
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    with pytest.raises(ValueError, match="with a graph of experts"):
        plots.adjacency(histories["SMoE"])


def test_curves_and_heat_maps_show_the_histories_numbers():
    history = run(symphony)[1].history()
    (axis,) = plots.fluctuation({"a": history}).axes
    expected = [sum(rates) / LAYERS for rates in history["fluctuation"]]
    assert axis.lines[0].get_ydata().tolist() == pytest.approx(expected)
    figure = plots.adjacency(history, windows=2)
    images = [axis.images[0].get_array() for axis in figure.axes if axis.images]
    # A row a layer, the first and the last window.
    assert len(images) == 2 * LAYERS
    assert torch.equal(torch.tensor(images[1].tolist()), history["adjacency"][-1][0])
    bars = plots.load(history).axes[0].patches
    assert [bar.get_height() for bar in bars] == pytest.approx(history["load"][-1][0])
