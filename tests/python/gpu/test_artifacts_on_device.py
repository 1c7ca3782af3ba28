"""moe-run on a device: every forward op from an artifact, without Python, torch or LLVM.

The list is the same on the simulator and on a GPU, where there is one.
"""

import ctypes
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from support import PACKAGE, rewrite_manifest, run_tool, save_router
from test_every_op import CASES, operands

import moe_mlir

NUMPY_TYPES = {"f32": np.float32, "f16": np.float16, "i64": np.int64, "index": np.int64,
               "i32": np.int32, "i1": np.bool_}


def why_not(device):
    library = ctypes.CDLL(str(PACKAGE / f"libmoe_{device}_runtime.so"))
    library.moe_gpu_unavailable.restype = ctypes.c_char_p
    return (library.moe_gpu_unavailable() or b"").decode()


@pytest.fixture(scope="module", params=["sim", "cuda"])
def device(request):
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


def record_calls(call, chip="sm_80"):
    """Every (module, function, buffers before, buffers after) of a call in `simulate`."""
    calls = []
    with moe_mlir.simulate(chip=chip) as simulation:
        run = simulation.run

        def record(kernel, buffers):
            before = [b.clone() if isinstance(b, torch.Tensor) else b for b in buffers]
            run(kernel, buffers)
            calls.append((kernel.text(), kernel.op, before, buffers))

        simulation.run = record
        call()
    return calls


def save(folder, description, values):
    for i, (argument, value) in enumerate(zip(description["arguments"], values)):
        array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        np.save(folder / f"in{i}.npy", array.astype(NUMPY_TYPES[argument["dtype"]], copy=False))


def check_artifact(text, name, before, after, folder, device, chip):
    """Runs a recorded call from an artifact; returns what its manifest says of the function."""
    (folder / "op.mlir").write_text(text)
    done = run_tool("moe-compile", "op.mlir", "-o", "op.artifact", f"--target={chip}", cwd=folder)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((folder / "op.artifact/manifest.json").read_text())
    (description,) = (f for f in manifest["functions"] if f["name"] == name)
    arguments, results = len(description["arguments"]), len(description["results"])
    save(folder, description, before)
    done = run_tool("moe-run", "op.artifact", f"--function={name}", f"--device={device}",
                    *(f"--input=in{i}.npy" for i in range(arguments)),
                    *(f"--output=out{i}.npy" for i in range(results)), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    for i, expected in enumerate(after[arguments:]):
        found = torch.from_numpy(np.load(folder / f"out{i}.npy"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6, equal_nan=True)
    return description


@pytest.mark.parametrize("op", CASES)
def test_artifact_equals_simulate(op, device, tmp_path):
    calls = record_calls(lambda: CASES[op](operands()))
    assert calls
    for call in calls:
        check_artifact(*call, tmp_path, device, "sm_80")


ROUTER = """func.func @route(%z: tensor<?x8xf32>) -> (tensor<?x2xf32>, tensor<?x2xi64>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x8xf32>
  %g = tensor.empty(%n) : tensor<?x2xf32>
  %i = tensor.empty(%n) : tensor<?x2xi64>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x8xf32>) outs(%g, %i : tensor<?x2xf32>, tensor<?x2xi64>)
      {kind = #moe.score_kind<logits>} -> tensor<?x2xf32>, tensor<?x2xi64>
  return %r#0, %r#1 : tensor<?x2xf32>, tensor<?x2xi64>
}"""


@pytest.fixture
def router(tmp_path):
    (tmp_path / "router.mlir").write_text(ROUTER)
    done = run_tool("moe-compile", "router.mlir", "-o", "router.artifact", "--target=sm_90",
                cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    np.save(tmp_path / "z.npy", np.arange(24, dtype=np.float32).reshape(3, 8))
    return tmp_path / "router.artifact"


def test_lists_an_artifact_for_an_absent_gpu(router):
    done = run_tool("moe-run", router, "--list")
    assert done.returncode == 0, done.stderr
    assert "target: sm_90" in done.stdout and "argument 0: f32[?, 8]" in done.stdout


@pytest.mark.parametrize("arguments, said", [
    (["--device=cpu"], "expected device cuda or sim for an artifact of target sm_90, found 'cpu'; "
                       "compile with --target=cpu"),
    (["--device=tpu"], "found 'tpu'"),
])
def test_refuses_devices_that_cannot_run_it(router, arguments, said):
    done = run_tool("moe-run", router, *arguments)
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.skipif(not why_not("cuda"), reason="a GPU is there")
def test_says_what_to_do_without_a_gpu(router, tmp_path):
    done = run_tool("moe-run", router, "--input", tmp_path / "z.npy")
    assert done.returncode == 1
    assert "cannot run kernels on device 'cuda': expected" in done.stderr
    assert "--device=sim" in done.stderr


def test_repeat_times_the_kernels(router, tmp_path, device):
    done = run_tool("moe-run", router, f"--device={device}", "--input", tmp_path / "z.npy",
                "--repeat=2")
    assert done.returncode == 0 and "route: 2 runs, shortest" in done.stdout, done


def test_faults_end_with_status_2_and_name_the_buffer(router, tmp_path):
    """The artifact's own PTX, changed so that it reads past the 96 bytes of its input."""
    ptx = (router / "kernel.ptx").read_text()
    changed, count = re.subn(r"(ld\.global[\w.]*\s+[^\[]+\[%rd\d+)(\+\d+)?\]", r"\1+96]", ptx)
    assert count
    (router / "kernel.ptx").write_text(changed)
    digest = hashlib.sha256(changed.encode()).hexdigest()
    rewrite_manifest(router, lambda m: m["files"]["kernel.ptx"].update(sha256=digest))
    done = run_tool("moe-run", router, "--device=sim", "--input", tmp_path / "z.npy")
    assert done.returncode == 2, done
    assert "past the end of argument 0 of route (96 bytes)" in done.stderr
    assert "expected kernels without faults, found" in done.stderr


def test_a_torch_program_brings_its_weights(device, tmp_path):
    torch.manual_seed(0)
    router = moe_mlir.nn.SMoE(24, 6, 2).eval()
    save_router(router, tmp_path / "router.pt2")
    done = run_tool("moe-compile", "router.pt2", "-o", "a", "--target=sm_80", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    h = torch.randn(33, 24)
    np.save(tmp_path / "h.npy", h.numpy())
    done = run_tool("moe-run", "a", f"--device={device}", "--input=h.npy", "--output=g.npy",
                "--output=i.npy", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = router(h)
    assert np.array_equal(np.load(tmp_path / "i.npy"), expected.indices.numpy())
    np.testing.assert_allclose(np.load(tmp_path / "g.npy"), expected.gates.detach().numpy(),
                               atol=2e-6)


def test_python_loads_an_artifact_for_a_chip(router):
    route = moe_mlir.load(router)
    z = torch.arange(24.0).reshape(3, 8)
    with moe_mlir.simulate() as simulation:
        gates, indices = route(z)
    assert len(simulation.reports) == 1
    expected = moe_mlir.topk_renorm(z, 2)
    assert torch.equal(indices, expected[1])
    torch.testing.assert_close(gates, expected[0])
    with pytest.raises(ValueError, match="expected CUDA tensors for 'route'.* `with moe_mlir.simulate"):
        route(z)


def test_artifact_of_warpgroups_equals_simulate(tmp_path):
    """A block of another size, and barriers in the middle of dynamic memory."""
    u = torch.randn(1, 150, 64).half() / 8
    p = torch.randn(1, 150, 16).softmax(-1).half()
    (call,) = record_calls(lambda: moe_mlir.similarity_inform(u, p, causal=True), "sm_90a")
    description = check_artifact(*call, tmp_path, "sim", "sm_90a")
    (kernel,) = description["kernels"]
    assert kernel["block_size"] == 384 and kernel["dynamic_smem"] > 48 * 1024


# Batches are counted along z.
MIX = """func.func @mix(%u: tensor<?x?x8xf32>, %e: tensor<?x?x4xf32>)
    -> (tensor<?x?x4xf32>, tensor<?x?xf32>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %b = tensor.dim %u, %c0 : tensor<?x?x8xf32>
  %n = tensor.dim %u, %c1 : tensor<?x?x8xf32>
  %p = tensor.empty(%b, %n) : tensor<?x?x4xf32>
  %l = tensor.empty(%b, %n) : tensor<?x?xf32>
  %r:2 = moe.similarity_inform ins(%u, %e : tensor<?x?x8xf32>, tensor<?x?x4xf32>)
      outs(%p, %l : tensor<?x?x4xf32>, tensor<?x?xf32>) {visibility = #moe.visibility<causal>}
      -> tensor<?x?x4xf32>, tensor<?x?xf32>
  return %r#0, %r#1 : tensor<?x?x4xf32>, tensor<?x?xf32>
}"""

CALLER = r"""#include "MoE/Runtime/Artifact.h"
#include <cstdio>
#include <exception>
using namespace moe::runtime;
// Memory that is on the device, as the caller says: nothing of it is copied.
alignas(16) static char tokens[(1 << 21) + 16], probs[1 << 20];
alignas(16) static char mixed[(1 << 20) + 16], sums[1 << 18];
static void call(const Function &f, int64_t batch, char *u, char *p) {
  Tensor in[] = {{"f32", {batch, 1, 8}, u, true}, {"f32", {batch, 1, 4}, probs, true}};
  Tensor out[] = {{"f32", {batch, 1, 4}, p, true}, {"f32", {batch, 1}, sums, true}};
  try {
    f.run(in, out);
    std::puts("ran");
  } catch (const std::exception &error) {
    std::puts(error.what());
  }
}
int main(int, char **argv) {
  Artifact artifact(argv[1], "sim");
  const Function &f = artifact.getFunction();
  call(f, 0, tokens, mixed);
  call(f, 1, tokens + 4, mixed);
  call(f, 1, tokens, mixed + 8);
  call(f, 65536, tokens, mixed);
}
"""


def test_callers_of_cpp_hear_which_argument(tmp_path):
    (tmp_path / "mix.mlir").write_text(MIX)
    (tmp_path / "main.cpp").write_text(CALLER)
    done = run_tool("moe-compile", "mix.mlir", "-o", "mix.artifact", "--target=sm_80", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "expected the C++ compiler that built the package"
    subprocess.run([compiler, "-std=c++20", f"-I{Path(__file__).parents[3] / 'include'}", "main.cpp", "-o", "main",
                    str(PACKAGE / "libmoe_runtime.so"), f"-Wl,-rpath,{PACKAGE}"], check=True,
                   cwd=tmp_path)
    done = subprocess.run([tmp_path / "main", "mix.artifact"], capture_output=True, text=True,
                          cwd=tmp_path, check=True)
    copy = "past one: copy it to memory of its own"
    assert done.stdout.splitlines() == [
        "ran",
        f"'mix': expected argument 0 at a multiple of 16 bytes, found an address that is 4 {copy}",
        f"'mix': expected result 0 at a multiple of 16 bytes, found an address that is 8 {copy}",
        "'mix': expected at most 65535 blocks along z of kernel 'mix_kernel', found 65536, by "
        "size 0 of argument 0: split the batch",
    ]
