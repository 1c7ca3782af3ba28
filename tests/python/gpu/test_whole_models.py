"""Whole models on sm_90a, in the simulator: dense layers, experts and attention in their kernels."""

import copy
import json

import numpy as np
import pytest
import torch
from support import rewrite_manifest, run_tool
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_mlir
from moe_mlir.gpu.launch import LaunchPlan
from moe_mlir.sim.simulation import simulate

BF16 = torch.bfloat16


class Layers(torch.nn.Module):
    """Slices of one layer's result that others read and that are returned: rows with gaps."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(256, 768, dtype=BF16)
        self.left = torch.nn.Linear(512, 256, bias=False, dtype=BF16)
        self.right = torch.nn.Linear(256, 512, dtype=BF16)

    def forward(self, x):
        z = self.first(x)
        return torch.cat([self.left(torch.relu(z[..., :512])), self.right(z[..., 512:]), z], -1)


class RunningSums(torch.nn.Module):
    def forward(self, x, mask):
        return x.cumsum(1), mask.cumsum(-1), x.cumprod(0)


class Deep(torch.nn.Module):
    """Equal layers, which have more tensors than all kernels take."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, dtype=BF16) for _ in range(34))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.float()


def relative_error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(2, 37), (1, 1), (3, 5), (1, 200), (0, 4)])
def test_dense_layers(shape):
    torch.manual_seed(0)
    model = Layers().eval()
    compiled = moe_mlir.compile(model, (torch.randn(2, 9, 256).to(BF16),), target="sm_90a")
    x = torch.randn(*shape, 256).to(BF16)
    with simulate(chip="sm_90a"), torch.no_grad():
        y = compiled(x)
        want = copy.deepcopy(model).double()(x.double())
    assert y.shape == want.shape
    assert ((y.double() - want).abs() <= 2**-7 * (1 + want.abs())).all()


@pytest.mark.parametrize("tokens", [1, 70])
def test_running_sums(tokens):
    x, mask = torch.randn(3, tokens), torch.rand(2, tokens) > 0.5
    compiled = moe_mlir.compile(RunningSums(), (x, mask), target="sm_90a")
    with simulate(chip="sm_90a"):
        sums, counts, products = compiled(x, mask)
    assert torch.equal(counts, mask.cumsum(-1))
    torch.testing.assert_close(products, x.cumprod(0), rtol=2**-22, atol=0)
    # The lanes of a warp add up parts.
    torch.testing.assert_close(sums.double(), x.double().cumsum(1), rtol=0, atol=2**-18)


def test_a_model_of_transformers():
    """Also in a module that transformers' own check of packed sequences is part of."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, use_cache=False)
    model = Qwen3MoeForCausalLM(config).to(BF16).eval()
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        compiled = moe_mlir.compile(model, (torch.randint(512, (1, 40)),), target="sm_90a")
        for tokens in (40, 3):
            ids = torch.randint(512, (1, tokens))
            with simulate(chip="sm_90a"):
                logits = compiled(ids).logits
            expected = exact(ids).logits
            # bf16 rounds between layers, as eager does; an expert chosen otherwise moves a token.
            bound = 4 * relative_error(model(ids).logits, expected)
            assert relative_error(logits, expected) <= max(bound, 2**-6)


def test_equal_layers_share_kernels(tmp_path):
    """Kernels take what they read, so that those of equal layers are one, in each host."""
    torch.manual_seed(0)
    model = Deep().eval()
    x = torch.randn(1, 40, 256).to(BF16)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("t")},))
    torch.export.save(program, tmp_path / "deep.pt2")
    done = run_tool("moe-compile", "deep.pt2", "-o", "deep", "--target=sm_90a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (function,) = json.loads((tmp_path / "deep" / "manifest.json").read_text())["functions"]
    kernels = function["kernels"]
    assert len(kernels) > 2 * len(model.layers)
    # What lies between two layers is in one of two places.
    assert len({kernel["name"] for kernel in kernels}) <= 12
    plan = LaunchPlan(function)
    buffers = [np.zeros([40 if size < 0 else size for size in entry["shape"]], np.int8)
               for entry in (*plan.arguments, *plan.results)]
    assert plan.workspace(buffers) <= 4 * x.nbytes
    assert max(len(kernel["parameters"]) for kernel in kernels) <= 8
    ptx = (tmp_path / "deep" / "kernel.ptx").read_text()
    assert ptx.count(".entry") == len({kernel["name"] for kernel in kernels})

    loaded = moe_mlir.load(tmp_path / "deep")
    for tokens in (40, 3):
        x = torch.randn(1, tokens, 256).to(BF16)
        with simulate(chip="sm_90a"), torch.no_grad():
            y = loaded(x)
            want = copy.deepcopy(model).double()(x.double())
        assert relative_error(y, want) <= 2**-6
        np.save(tmp_path / "x.npy", x.view(torch.int16).numpy().view("V2"))
        done = run_tool("moe-run", "deep", "--device=sim", "--input", "x.npy", "--output", "y.npy",
                        cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert torch.equal(torch.from_numpy(np.load(tmp_path / "y.npy")), y)


def test_parameters_that_there_are_not(tmp_path):
    """A damaged manifest is refused before anything is launched."""
    model = Deep().eval()
    x = torch.randn(1, 4, 256).to(BF16)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "deep.pt2")
    run_tool("moe-compile", "deep.pt2", "-o", "deep", "--target=sm_90a", cwd=tmp_path)

    def change(manifest):
        manifest["functions"][0]["kernels"][0]["parameters"][0] = 1000
    rewrite_manifest(tmp_path / "deep", change)
    np.save(tmp_path / "x.npy", x.view(torch.int16).numpy().view("V2"))
    done = run_tool("moe-run", "deep", "--device=sim", "--input", "x.npy", cwd=tmp_path)
    assert done.returncode == 1
    assert "expected parameters of kernel 'main_kernel' below" in done.stderr
