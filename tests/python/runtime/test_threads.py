"""Functions without state take calls of several threads at once."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support import PACKAGE, run_tool

ROOT = Path(__file__).resolve().parents[3]


class Gates(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 16)

    def forward(self, h):
        gates, indices = torch.topk(self.linear(h).softmax(-1), 2, dim=-1)
        return gates, indices


def save_program(path):
    torch.export.save(torch.export.export(Gates().eval(), (torch.randn(1024, 64),)), path)
    return path


@pytest.fixture(scope="module")
def overlapping_calls(tmp_path_factory):
    program = tmp_path_factory.mktemp("program") / "overlapping_calls"
    built = subprocess.run(
        [shutil.which("g++") or shutil.which("clang++"), "-std=c++20", "-Wall", "-pthread",
         Path(__file__).with_name("overlapping_calls.cpp"), "-I", ROOT / "include", "-L", PACKAGE,
         f"-Wl,-rpath,{PACKAGE}", "-lmoe_runtime", "-o", program], capture_output=True, text=True)
    assert built.returncode == 0 and not built.stderr, built.stderr
    return program


@pytest.mark.parametrize("source", ["router.mlir", "model.pt2"])
def test_calls_of_several_threads_do_not_disturb_each_other(source, overlapping_calls, tmp_path):
    path = save_program(tmp_path / source) if source == "model.pt2" \
        else ROOT / "examples" / "deploy" / source
    compiled = run_tool("moe-compile", path, "-o", tmp_path / "artifact", "--target=cpu")
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([overlapping_calls, tmp_path / "artifact", "6", "500"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
