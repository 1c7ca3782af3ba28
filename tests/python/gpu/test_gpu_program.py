"""examples/deploy/route_gpu.cpp: one C++ program for the simulator and for a GPU, where there is one."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support import PACKAGE, rewrite_manifest, run_tool
from test_artifacts_on_device import why_not

DEPLOY = Path(__file__).resolve().parents[3] / "examples" / "deploy"
INCLUDE = DEPLOY.parents[1] / "include"
BATCHES, TOKENS, WIDTH, EXPERTS = 2, 3, 64, 16


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    found = tmp_path_factory.mktemp("program") / "route_gpu"
    built = subprocess.run(
        [shutil.which("g++") or shutil.which("clang++"), "-std=c++20", "-Wall", "-Wextra",
         DEPLOY / "route_gpu.cpp", "-I", INCLUDE, "-L", PACKAGE, f"-Wl,-rpath,{PACKAGE}",
         "-lmoe_runtime", "-o", found], capture_output=True, text=True)
    assert built.returncode == 0 and not built.stderr, built.stderr
    return found


def compile_router(folder, target):
    done = run_tool("moe-compile", DEPLOY / "router.mlir", "-o", folder / "router", f"--target={target}")
    assert done.returncode == 0, done.stderr
    return folder / "router"


def run(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)


def wave(start, *shape):
    """The program's inputs: sines, rounded to float32."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float64).sin().float().double().view(shape)


@pytest.mark.parametrize("device", ["sim", "cuda"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_it_routes_as_torch_does(device, target, program, tmp_path):
    if reason := why_not(device):
        pytest.skip(reason)
    done = run(program, compile_router(tmp_path, target), f"--device={device}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == BATCHES * TOKENS
    tokens = wave(0, BATCHES * TOKENS, WIDTH)
    top, experts = (tokens @ wave(1000, EXPERTS, WIDTH).T).topk(2)
    for row, line in enumerate(lines):
        assert line.startswith(f"batch {row // TOKENS}, token {row % TOKENS}: ")
        pairs = re.findall(r"expert (\d+) with (?:gate )?([\d.]+)", line)
        assert [int(expert) for expert, _ in pairs] == experts[row].tolist()
        gates = torch.tensor([float(gate) for _, gate in pairs], dtype=torch.float64)
        torch.testing.assert_close(gates, top[row].softmax(-1), rtol=0, atol=4e-6)


def test_a_fault_of_a_kernel_is_an_error_that_names_the_buffer(program, tmp_path):
    """The artifact's own PTX, changed so that it reads past the end of the weights."""
    folder = compile_router(tmp_path, "sm_90a")
    weight_bytes = EXPERTS * WIDTH * 4
    ptx = (folder / "kernel.ptx").read_text()
    changed, count = re.subn(r"(ld\.global[\w.]*\s+[^\[]+\[%rd\d+)(\+\d+)?\]",
                             rf"\1+{weight_bytes}]", ptx)
    assert count
    (folder / "kernel.ptx").write_text(changed)
    digest = hashlib.sha256(changed.encode()).hexdigest()
    rewrite_manifest(folder, lambda m: m["files"]["kernel.ptx"].update(sha256=digest, size=len(changed)))
    done = run(program, folder, "--device=sim")
    assert done.returncode == 1
    assert re.search(r"past the end of weight \(4096 bytes\)", done.stderr), done.stderr


@pytest.mark.parametrize("target, device, said", [
    ("cpu", "cpu", "expected an artifact for a GPU, found one for cpu: compile it with --target="),
    ("sm_90a", "tpu", "found 'tpu'"),
    ("sm_90a", "", "expected the CUDA driver"),
])
def test_it_says_what_cannot_run(target, device, said, program, tmp_path):
    if not device and not why_not("cuda"):
        pytest.skip("a GPU is there")
    done = run(program, compile_router(tmp_path, target), f"--device={device}")
    assert done.returncode == 1 and said in done.stderr
    assert run(program, tmp_path).stderr == "expected: route_gpu ARTIFACT --device=sim|cuda\n"
