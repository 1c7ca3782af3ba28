"""AOTInductor packages with our ops: the names of kernels, and what is refused.

The C++ program that runs a package is built and run by the page docs/Deploying.md.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from support import BUILD, Gates

from moe_mlir import nn
from moe_mlir.frontends import aot
from moe_mlir.sim.simulation import active_simulation

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = BUILD / "python" / "moe_mlir" / "libmoe_torch.so"


def exported(router, *shape):
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        return torch.export.export(Gates(router.eval()), (torch.randn(*shape),),
                                   dynamic_shapes=({0: rows},))


def test_kernels_of_a_program_have_the_names_that_cpp_forms():
    names = aot.find_kernels(exported(nn.SMoE(16, 8, 2), 4, 16))
    one = "3ff0000000000000"
    assert set(names) == {"router_logits_f32x16_f32x8x16_f32x8_f32x8",
                          f"topk_renorm_logits_true_{one}_f32x8_f32x2_i64x2"}
    (name,) = [n for n in aot.find_kernels(exported(
        nn.DeepSeekV3Router(16, 32, 4, n_group=4, topk_group=2, route_scale=2.5), 4, 16))
        if n.startswith("topk")]
    assert re.fullmatch(r"topk_renorm_logits_sigmoid_4_2_top2_sum_true_[0-9a-f]{16}_"
                        r"4004000000000000_f32x32_f32x32_f32x4_i64x4", name)


def test_recording_runs_no_kernel_and_ends():
    aot.find_kernels(exported(nn.SMoE(16, 8, 2), 4, 16))
    assert active_simulation() is None


def test_ops_that_cpp_lacks_are_named():
    with pytest.raises(ValueError, match="found 'similarity_inform'; run this model with"):
        aot.find_kernels(exported(nn.SimilaritySMoE(16, 8, 2, causal=True), 3, 4, 16))


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="expected a torch.export.ExportedProgram, found SMoE"):
        aot.package(nn.SMoE(16, 8, 2), tmp_path / "a.pt2")
    with pytest.raises(ValueError, match="ends in .pt2"):
        aot.package(exported(nn.SMoE(16, 8, 2), 4, 16), tmp_path / "a.so")


def test_the_library_needs_nothing_but_the_stable_abi():
    if not LIBRARY.exists():
        pytest.skip("built without torch")
    shown = subprocess.run(["nm", "-D", "--undefined-only", LIBRARY], capture_output=True, text=True)
    symbols = {line.split()[-1].partition("@")[0] for line in shown.stdout.splitlines()}
    of_torch = {s for s in symbols if "torch" in s or "c10" in s or s.startswith("aoti")}
    assert of_torch and all(re.match(r"(aoti_)?torch_", s) for s in of_torch), sorted(of_torch)
    # Newer than the oldest torch that it promises to serve.
    assert not of_torch & {"torch_exception_get_what", "torch_new_stable_ivalue"}
