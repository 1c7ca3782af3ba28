"""The checks of a GPU's machine, in the simulator and without the compiler."""

import os
import subprocess
import sys

import pytest
import torch

import moe_mlir
from moe_mlir.gpu_check import __main__ as gpu_check
from moe_mlir.gpu_check import benchmark, cases


@pytest.mark.parametrize("case", cases.all_cases(), ids=lambda case: case.name)
def test_case(case):
    with moe_mlir.simulate(chip="sm_80"):
        assert case.check("cpu") == ""


def test_a_wrong_result_is_found():
    case = cases.all_cases()[0]
    wrong = cases.Case(case.name, case.inputs, lambda *x: tuple(y + 1 for y in case.call(*x)),
                       case.expect, case.tolerance)
    assert "of the tolerance" in wrong.check("cpu")


def test_packed_kernels_need_no_compiler(tmp_path, monkeypatch):
    """One case in a process that has neither the native module nor the build tree."""
    case = next(c for c in cases.all_cases() if c.name == "topk_renorm")
    monkeypatch.setattr(cases, "all_cases", lambda: [case])
    monkeypatch.setattr(benchmark, "all_rows", lambda: [])
    gpu_check.main(["pack", str(tmp_path / "pack"), "--chips=sm_80"])
    names = {p.name for p in (tmp_path / "pack/moe_mlir").iterdir()}
    assert "libmoe_cuda_runtime.so" in names and not any("_moe." in name for name in names)
    code = """
import os, sys
os.environ["MOE_MLIR_KERNELS"] = "kernels"
sys.path.insert(0, os.getcwd())
import torch, moe_mlir
with moe_mlir.simulate(chip="sm_90"):
    print(moe_mlir.topk_renorm(torch.arange(24.0).reshape(3, 8), 2)[1].tolist())
    try:
        moe_mlir.topk_renorm(torch.zeros(3, 9), 2)
    except ImportError as error:
        print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "pack", text=True,
                          capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "[[7, 6], [7, 6], [7, 6]]" in done.stdout
    assert "expected kernels for this 'topk_renorm' and sm_90 in kernels, found none" in done.stdout


def test_every_row_of_the_benchmark_is_computed_right():
    """At a fraction of its size: ours against torch."""
    for row in benchmark.all_rows():
        inputs = [x[:2, :40] if x.dim() == 3 else x[:64] for x in row.make("cpu")]
        ours, expected = row.ours(*inputs), row.eager(*inputs)
        a = ours[0] if isinstance(ours, tuple) else ours
        b = expected[0] if isinstance(expected, tuple) else expected
        scale = 0.03 if inputs[0].dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(a.float(), b.float(), rtol=scale, atol=scale, msg=row.name)


def test_refuses_a_folder_with_files(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(SystemExit, match="to be free or empty"):
        gpu_check.main(["pack", str(tmp_path)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_says_what_to_do_without_a_gpu():
    with pytest.raises(SystemExit, match="expected a GPU .* --device=sim"):
        gpu_check.main(["run"])
