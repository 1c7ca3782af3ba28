"""What `RoutingMonitor.write` puts into an event file, read back by TensorBoard."""

import doctest

import pytest
import torch

from moe_mlir import metrics, nn

pytest.importorskip("tensorboard", reason="TensorBoard is not installed; requirements.txt pins it")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402

D, E, K = 16, 8, 2
TOKENS = 40


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(nn.MoELayer(nn.SMoE(D, E, K), 24) for _ in range(2))

    def forward(self, h):
        for layer in self.layers:
            h = h + layer(h)[0]
        return h


@pytest.fixture
def written(tmp_path):
    """(the history of two windows, what the file of them holds)"""
    torch.manual_seed(0)
    model, probe = Model(), torch.randn(20, D)
    monitor = metrics.RoutingMonitor(model)
    with SummaryWriter(tmp_path) as writer:
        for step in (10, 20):
            model(torch.randn(TOKENS, D))
            monitor.probe(lambda: model(probe))
            monitor.end_window()
            monitor.write(writer, step)
            for weight in model.parameters():
                weight.data += 0.1 * torch.randn_like(weight)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    events.Reload()
    return monitor.history(), events


@pytest.mark.parametrize("metric", ["load_std", "entropy"])
@pytest.mark.parametrize("layer", [0, 1])
def test_scalars_are_those_of_the_history(written, metric, layer):
    history, events = written
    read = events.Scalars(f"routing/layers.{layer}.router/{metric}")
    assert [event.step for event in read] == [10, 20]
    assert [event.value for event in read] == pytest.approx(
        [window[layer] for window in history[metric]], rel=1e-6)


def test_metrics_of_pairs_of_layers_and_of_probes(written):
    history, events = written
    tags = [tag for tag in events.Tags()["scalars"] if "instability" in tag]
    assert tags == ["routing/layers.1.router/instability"]
    assert [event.value for event in events.Scalars(tags[0])] == pytest.approx(
        [window[1] for window in history["instability"]], rel=1e-6)
    for layer in 0, 1:
        (event,) = events.Scalars(f"routing/layers.{layer}.router/fluctuation")
        assert event.step == 20
        assert event.value == pytest.approx(history["fluctuation"][0][layer], rel=1e-6)


def test_histograms_have_a_bar_for_each_expert(written):
    history, events = written
    for layer in 0, 1:
        read = events.Histograms(f"routing/layers.{layer}.router/load")
        assert [event.step for event in read] == [10, 20]
        for event, window in zip(read, history["load"]):
            assert event.histogram_value.num == TOKENS * K
            limits = list(event.histogram_value.bucket_limit)
            bars = dict(zip(limits, event.histogram_value.bucket))
            shares = [bars.get(expert + 0.5, 0) / (TOKENS * K) for expert in range(E)]
            assert shares == pytest.approx(window[layer])


def test_a_router_alone_and_another_prefix(tmp_path):
    router = nn.SMoE(D, E, K)
    monitor = metrics.RoutingMonitor(router)
    router(torch.randn(TOKENS, D))
    monitor.end_window()
    with SummaryWriter(tmp_path) as writer:
        monitor.write(writer, 1, prefix="train")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "train/router/entropy" in events.Tags()["scalars"]


def test_without_a_window():
    monitor = metrics.RoutingMonitor(nn.SMoE(D, E, K))
    with pytest.raises(ValueError, match=r"expected a window that has ended, found none; call end_window"):
        monitor.write(None, 1)


def test_the_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = dict(RoutingMonitor=metrics.RoutingMonitor, model=Model(), torch=torch,
                 SummaryWriter=SummaryWriter)
    for test in doctest.DocTestFinder().find(metrics.RoutingMonitor.write, "write", globs=names):
        assert doctest.DocTestRunner().run(test).failed == 0
    assert any((tmp_path / "runs").iterdir())
