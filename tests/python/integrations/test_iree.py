"""Routers as upstream dialects, compiled and run by IREE on the CPU: the gates and experts of torch.

`moe-opt --moe-decompose` writes an op of ours as linalg, arith, math and tensor.
"""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from support import Gates

import moe_mlir
from moe_mlir import nn

REASON = ("IREE is not installed: pip install iree-base-compiler==3.13.0 iree-base-runtime==3.13.0 "
          "(390 MB on disk, hence not in requirements.txt)")
pytest.importorskip("iree.compiler", reason=REASON)
runtime = pytest.importorskip("iree.runtime", reason=REASON)

MOE_OPT = pathlib.Path(moe_mlir.__file__).absolute().parents[2] / "bin" / "moe-opt"
IREE_COMPILE = pathlib.Path(sys.executable).parent / "iree-compile"
D, E, K = 16, 8, 2
# One for each op that selects or mixes, and gates of other kinds.
ROUTERS = {
    "topk_renorm": lambda: nn.SMoE(D, E, K),
    "topk_renorm of a softmax": lambda: nn.Switch(D, E, 1),
    "normalised rows": lambda: nn.XMoE(D, E, K, tau=0.3),
    "grouped_topk": lambda: nn.DeepSeekV3Router(D, E, K, n_group=4, topk_group=2, route_scale=2.5),
    "similarity_inform": lambda: nn.SimilaritySMoE(D, E, K, causal=True),
    "graph_smooth": lambda: nn.SymphonySMoE(D, E, K, cold_start="base"),
}


def decompose(source, folder):
    """The path of IR, with our ops written in upstream dialects."""
    path = folder / "upstream.mlir"
    subprocess.run([MOE_OPT, source, "--moe-decompose", "--canonicalize", "--cse", "-o", path],
                   check=True)
    assert not re.search(r"= moe\.|^ *moe\.", path.read_text(), re.MULTILINE)
    return path


def compile_with_iree(path):
    done = subprocess.run(
        [IREE_COMPILE, path, "--iree-hal-target-device=local",
         "--iree-hal-local-target-device-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host",
         "-o", path.with_suffix(".vmfb")], capture_output=True, text=True,
        env=dict(os.environ, PYTHONPATH=""))
    return done


def load(path):
    config = runtime.Config("local-task")
    module = runtime.VmModule.copy_buffer(config.vm_instance, path.with_suffix(".vmfb").read_bytes())
    context = runtime.SystemContext(config=config)
    context.add_vm_module(module)
    return context.modules.module.main


class Run:
    """A module of torch as IREE runs it; weights are arguments by name."""

    def __init__(self, module, example, folder):
        source = folder / "exported.mlir"
        moe_mlir.export(module, (example,)).save(source)
        path = decompose(source, folder)
        done = compile_with_iree(path)
        assert done.returncode == 0, done.stderr[:2000]
        (head,) = re.findall(r"func\.func @main\(.*", path.read_text())
        self.names = re.findall(r'moe\.name = "([^"]*)"', head)
        self.state, self.main = module.state_dict(), load(path)

    def __call__(self, h):
        arguments = [self.state.get(name, h).numpy() for name in self.names]
        return [np.asarray(result) for result in self.main(*arguments)]


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router(name, tmp_path):
    torch.manual_seed(0)
    module = Gates(ROUTERS[name]()).eval()
    run = Run(module, torch.randn(2, 6, D), tmp_path)
    for shape in (2, 6, D), (3, 11, D):  # sizes stay open
        h = torch.randn(shape)
        gates, indices = run(h)
        with torch.no_grad():
            wanted = module(h)
        np.testing.assert_array_equal(indices, wanted[1].numpy())
        np.testing.assert_allclose(gates, wanted[0].numpy(), rtol=1e-5, atol=1e-6)


def test_ties_nan_and_infinities(tmp_path):
    class Top(torch.nn.Module):
        def forward(self, scores):
            return moe_mlir.topk_renorm(scores, 3)

    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1, 1, 1, 1, 1], [0, 2, 2, -inf, 2], [-inf, -inf, 3, -inf, -inf],
                         [nan, 1, 2, 3, 4], [-inf] * 5, [0.0, -0.0, 0, 0, -1]])
    gates, indices = Run(Top(), rows, tmp_path)(rows)
    wanted = moe_mlir.topk_renorm(rows, 3)
    np.testing.assert_array_equal(indices, wanted[1].numpy())
    np.testing.assert_allclose(gates, wanted[0].numpy(), rtol=1e-6, equal_nan=True)


# Upstream IR alone, with nothing of ours in it.
FORALL = """
func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {
  %e = tensor.empty() : tensor<8xf32>
  %r = scf.forall (%i) in (8) shared_outs(%o = %e) -> tensor<8xf32> {
    %s = tensor.extract_slice %a[%i] [1] [1] : tensor<8xf32> to tensor<1xf32>
    scf.forall.in_parallel {
      tensor.parallel_insert_slice %s into %o[%i] [1] [1] : tensor<1xf32> into tensor<8xf32>
    }
  }
  return %r : tensor<8xf32>
}
"""


def test_what_iree_refuses(tmp_path):
    """Experts and thresholds. Once IREE takes them, this fails: then they are worth a try again."""
    errors = {}
    for name, module in (("experts", nn.MoELayer(nn.SMoE(D, E, K), 32)),
                         ("thresholds", Gates(nn.DynamicTopP(D, E, E, theta=0.1)))):
        source = tmp_path / f"{name}.mlir"
        moe_mlir.export(module, (torch.randn(6, D),)).save(source)
        path = decompose(source, tmp_path)
        if name == "experts":
            assert "scf.forall" in path.read_text()
        errors[name] = compile_with_iree(path)
    alone = tmp_path / "forall.mlir"
    alone.write_text(FORALL)
    assert errors["experts"].returncode != 0 and compile_with_iree(alone).returncode != 0
    assert errors["thresholds"].returncode != 0
    assert "index types must not cross the dispatch boundary" in errors["thresholds"].stderr
