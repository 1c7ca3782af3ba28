"""A whole layer of experts on a device: router, dispatch, experts and combination.

From an artifact without Python by `moe-run`, and from torch by `moe_mlir.load`.
"""

import numpy as np
import pytest
import torch
from support import run_tool
from test_artifacts_on_device import device  # noqa: F401  a fixture

import moe_mlir
from moe_mlir import nn

D, E = 32, 8
LAYERS = {
    "smoe": lambda: nn.MoELayer(nn.SMoE(D, E, 2), d_hidden=48),
    "shared": lambda: nn.MoELayer(nn.DeepSeekV3Router(D, E, 2, n_group=2, topk_group=1),
                                  d_hidden=48, shared=1),
    "capacity": lambda: nn.MoELayer(nn.Switch(D, E), d_hidden=48, capacity_factor=1.0),
    "priority": lambda: nn.MoELayer(nn.VMoE(D, E, 2), d_hidden=48, capacity_factor=0.5,
                                    priority="gate"),
    "similarity": lambda: nn.MoELayer(nn.SimilaritySMoE(D, E, 2, causal=True), d_hidden=48),
    "symphony": lambda: nn.MoELayer(nn.SymphonySMoE(D, E, 2), d_hidden=48),
    "hyper": lambda: nn.MoELayer(nn.HyperRouter(D, E, 2), d_hidden=48),
    "xmoe": lambda: nn.MoELayer(nn.XMoE(D, E, 2), d_hidden=48),
    "top_p": lambda: nn.MoELayer(nn.DynamicTopP(D, E), d_hidden=48),
    "soft": lambda: nn.MoELayer(nn.SoftMoE(D, E, slots=2), d_hidden=48),
}


class Outputs(torch.nn.Module):
    """A layer without its `Routing`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, h):
        return self.layer(h)[0]


@pytest.fixture(scope="module", params=LAYERS)
def model(request):
    torch.manual_seed(0)
    return Outputs(LAYERS[request.param]()).eval()


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer")
    n = torch.export.Dim("n", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(1, 40, D),), dynamic_shapes=({1: n},))
    torch.export.save(program, folder / "layer.pt2")
    done = run_tool("moe-compile", "layer.pt2", "-o", "layer", "--target=sm_80", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "layer"


@pytest.mark.drawn(10)
@pytest.mark.parametrize("n", [2, 75])
def test_moe_run(model, artifact, device, n):  # noqa: F811
    h = torch.randn(1, n, D)
    folder = artifact.parent
    np.save(folder / "h.npy", h.numpy())
    done = run_tool("moe-run", "layer", f"--device={device}", "--input=h.npy", "--output=y.npy",
                    cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    with torch.no_grad():
        expected = model(h).numpy()
    np.testing.assert_allclose(np.load(folder / "y.npy"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("way", ["load", "compile"])
def test_from_torch(model, artifact, way):
    layer = moe_mlir.load(artifact) if way == "load" else \
        moe_mlir.compile(model, (torch.randn(1, 40, D),), target="sm_80")
    h = torch.randn(1, 21, D)
    with moe_mlir.simulate() as simulation:
        y = layer(h)
    assert simulation.reports and all(not report.findings for report in simulation.reports)
    with torch.no_grad():
        torch.testing.assert_close(y, model(h), rtol=1e-5, atol=1e-5)
