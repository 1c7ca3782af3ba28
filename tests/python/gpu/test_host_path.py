"""What the host does for a launch: on the simulator's runtime, and call by call on a stand-in for
the CUDA driver, which is not there."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import textwrap

import numpy as np
import pytest
import torch
from support import serve_python
from test_cuda_dispatch import on_simulated_driver, registered, runtime  # noqa: F401
from test_no_spills import modules
from test_router import check as check_routes

import moe_mlir
from moe_mlir.compiler.jit import compile_kernels_cached
from moe_mlir.gpu import cuda
from moe_mlir.gpu.launch import KernelLaunch, LaunchPlan
from moe_mlir.sim.simulation import Simulation
from moe_mlir_bench.gpu_check.cases import OPS, operands
from moe_mlir_bench.gpu_check.modules import router_text

PTX = """.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k(.param .u64 p) {
  .reg .b32 %r<3>;
  .shared .align 16 .b8 tile[32768];
  mov.u32 %r1, dynamic;
  mov.u32 %r2, tile;
  st.shared.u32 [%r1], %r2;
  st.shared.u32 [%r2], %r1;
  ret;
}
"""


def launch(runtime, grid=(1,), dynamic_smem=0, module=None):
    function = runtime.find(module or runtime.load(PTX), "k")
    value = (ctypes.c_uint64 * 1)(0)
    pointer = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    runtime.launch(function, KernelLaunch("k", grid, 32, dynamic_smem), 0, pointer)


# ---------------------------------------------------------------- limits


def test_shared_memory_is_allowed_before_the_launch(runtime):
    """32 KB static and 20 KB dynamic: more than 48 KB together, dynamic alone is less."""
    launch(runtime, dynamic_smem=20 * 1024)
    launch(runtime, dynamic_smem=16)
    with pytest.raises(cuda.GpuError, match="at most 232448 bytes of shared memory on sm_90"):
        launch(runtime, dynamic_smem=200 * 1024)


@pytest.mark.parametrize("experts", [65, 160])
def test_a_fused_router_has_more_than_48_kb(experts, runtime):  # noqa: F811
    """Static and dynamic memory together; the dynamic one alone needs no permission."""
    code = json.loads(compile_kernels_cached(
        router_text(experts, 64, 8, dtype=torch.bfloat16, bias=False), "sm_80"))
    (function,) = code["functions"]
    (kernel,) = function["kernels"]
    static = sum(int(size) for size in re.findall(
        r"\.shared [^;]*\[(\d+)\];", code["ptx"]))
    assert kernel["dynamic_smem"] <= 48 * 1024 < static + kernel["dynamic_smem"]
    h, w = (torch.randn(n, 64).bfloat16() for n in (9, experts))
    gates, ids = torch.empty(9, 8), torch.empty(9, 8, dtype=torch.int32)
    registered(runtime.library, [h, w, gates, ids])
    run = cuda.GpuFunction(runtime, runtime.load(code["ptx"]), LaunchPlan(function))
    run(h, w, gates, ids)
    z = h.double() @ w.double().T
    check_routes(z.numpy(), gates.double().numpy(), ids.long().numpy(), 64)


@pytest.mark.parametrize("grid, dim", [((1, 65536), "y"), ((1, 1, 65536), "z"), ((2**32 + 1,), "x")])
def test_grids_that_no_chip_has(runtime, grid, dim):
    with pytest.raises(cuda.GpuError, match=f"'k' on .*blocks along {dim}, found {max(grid)}"):
        launch(runtime, grid)


def plan(*shapes, results=(), kernels=()):
    def describe(shapes):
        return [{"dtype": "f32", "shape": list(shape)} for shape in shapes]

    return LaunchPlan({"name": "f", "arguments": describe(shapes), "results": describe(results),
                       "kernels": list(kernels)})


def test_a_grid_names_the_argument_that_makes_it():
    kernel = {"name": "k", "grid": [4, 2, ["ceildiv", ["arg", 1, 0], 2]], "block_size": 32,
              "dynamic_smem": 0}
    few, many = (np.broadcast_to(np.zeros(1, np.float32), (n, 8)) for n in (4, 131072))
    assert plan((-1, 8), (-1, 8), kernels=[kernel]).launches([many, few])[0].grid == (4, 2, 2)
    with pytest.raises(ValueError, match="f: expected at most 65535 blocks along z of kernel 'k', "
                                         "found 65536, by size 0 of argument 1: split the batch"):
        plan((-1, 8), (-1, 8), kernels=[kernel]).launches([few, many])


@pytest.mark.parametrize("op", ["combine", "soft_dispatch", "attention_posterior"])
def test_a_million_tokens_fit_a_grid(op):
    """Only x has room for them."""
    for text in modules([(OPS[op], moe_mlir, operands())]):
        for function in json.loads(compile_kernels_cached(text, "sm_80"))["functions"]:
            buffers = []
            for entry in [*function["arguments"], *function["results"]]:
                shape = entry["shape"]
                dynamic = [dim for dim, size in enumerate(shape) if size < 0]
                buffers.append(np.broadcast_to(np.zeros(1, np.int8), [
                    size if size >= 0 else 2**20 if dim == dynamic[-1] else 2
                    for dim, size in enumerate(shape)]))
            assert LaunchPlan(function).launches(buffers)


def test_more_tokens_than_y_holds():
    tokens = 65537
    rows, gates = torch.randn(2 * tokens, 4), torch.rand(tokens, 2)
    places = torch.randperm(2 * tokens).view(tokens, 2)
    with moe_mlir.simulate(chip="sm_80"):
        found = moe_mlir.combine(rows, gates, places)
    expected = (rows[places].double() * gates[..., None]).sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_sizes_beyond_32_bits_are_refused():
    wide = np.broadcast_to(np.zeros(1, np.float32), (2**31, 8))
    with pytest.raises(ValueError, match="sizes of at most 2147483647.*found 2147483648 as size 0 "
                                         "of argument 0"):
        plan((-1, 8)).sizes([wide])
    assert plan((-1, 8)).sizes([wide[1:]]) == [2**31 - 1]


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_arguments_that_kernels_cannot_read_are_copied(make):
    whole = make(9.0)
    unaligned = plan((-1,)).align([whole[1:]])
    assert list(unaligned[0]) == list(whole[1:])
    address = getattr(unaligned[0], "data_ptr", lambda: unaligned[0].ctypes.data)()
    assert address % 16 == 0 and plan((-1,)).align([whole])[0] is whole
    with pytest.raises(ValueError, match="result 0 at a multiple of 16 bytes"):
        plan(results=[(-1,)]).align([whole[1:]])


def test_unaligned_views_give_the_same():
    h, weight = torch.randn(16, 24), torch.randn(8, 24)
    tokens = torch.empty(16 * 24 + 1, dtype=torch.bfloat16)[1:].view(16, 24).copy_(h)
    with moe_mlir.simulate(chip="sm_90"):
        found = moe_mlir.router_logits(tokens, weight.bfloat16())
    expected = tokens.double() @ weight.bfloat16().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- capture


@pytest.fixture
def captured(runtime):  # noqa: F811
    for name in ("begin_capture", "end_capture", "replay"):
        getattr(runtime.library, f"moe_sim_{name}").restype = ctypes.c_char_p

    class Capture:
        def __enter__(self):
            assert runtime.library.moe_sim_begin_capture() is None

        def __exit__(self, *_):
            assert runtime.library.moe_sim_end_capture() is None

        def replay(self):
            assert runtime.library.moe_sim_replay() is None

    return Capture()


@pytest.mark.parametrize("op", ["topk_renorm", "adjacency_update"])
def test_a_call_can_be_captured_and_replayed(op, runtime, on_simulated_driver, captured, monkeypatch):  # noqa: F811
    """Once its shapes have run: nothing is loaded, allocated by the runtime, or waited for."""
    calls, launch_on_driver = [], Simulation.run

    def run(self, kernel, tensors):
        calls.append(tensors)
        launch_on_driver(self, kernel, tensors)

    monkeypatch.setattr(Simulation, "run", run)
    with moe_mlir.simulate(chip="sm_80"):
        OPS[op](moe_mlir, operands())
        with captured:
            OPS[op](moe_mlir, operands())
    once, graph = calls
    before = runtime.library.moe_gpu_num_findings()
    for _ in range(2):
        # The kernels' results come last.
        graph[-1].fill_(7)
        captured.replay()
        assert torch.equal(graph[-1], once[-1])
    assert runtime.library.moe_gpu_num_findings() == before


def test_what_a_capture_does_not_permit(runtime, captured):  # noqa: F811
    module = runtime.load(PTX)
    with captured:
        launch(runtime, dynamic_smem=64, module=module)
        with pytest.raises(cuda.GpuError, match="loading a module is not permitted while a stream"):
            runtime.load(PTX)
        reason = runtime.library.moe_sim_replay()
        assert b"replaying a graph is not permitted" in reason
    assert b"none that has begun" in runtime.library.moe_sim_end_capture()


# ---------------------------------------------------------------- the driver's calls

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
static void note(const char *text) { printf("%s\n", text); fflush(stdout); }
#define CALL(name, ...) int name(__VA_ARGS__)
#define NOTED(name) int name(void) { note(#name); return 0; }
CALL(cuInit, unsigned f) { return 0; }
CALL(cuGetErrorString, int e, const char **t) { *t = "device kernel image is invalid"; return 0; }
CALL(cuDeviceGet, int *d, int n) { *d = n; return 0; }
CALL(cuDeviceGetAttribute, int *v, int a, int d) {
  *v = a == 75 ? 9 : a == 97 ? 232448 : 0;
  return 0;
}
CALL(cuDevicePrimaryCtxRetain, void **c, int d) { *c = c; return 0; }
CALL(cuCtxSetCurrent, void *c) { return 0; }
CALL(cuModuleLoadDataEx, void **m, const char *text, unsigned n, unsigned *o, void **v) {
  note("cuModuleLoadDataEx");
  *m = m;
  for (unsigned i = 0; i < n && strstr(text, "broken"); ++i)
    if (o[i] == 5) strcpy(v[i], "ptxas: line 1: what is broken");
  return strstr(text, "broken") ? 200 : 0;
}
CALL(cuModuleGetFunction, void **f, void *m, const char *n) { *f = m; return 0; }
CALL(cuFuncGetAttribute, int *v, int a, void *f) { *v = a == 1 ? 32768 : 0; return 0; }
CALL(cuLaunchKernelEx, void *c, void *f, void **p, void **e) {
  note("cuLaunchKernelEx");
  const char *result = getenv("LAUNCH_RESULT");
  return result ? atoi(result) : 0;
}
CALL(cuFuncSetAttribute, void *f, int a, int v) {
  printf("cuFuncSetAttribute %d %d\n", a, v); fflush(stdout); return 0;
}
NOTED(cuModuleUnload) NOTED(cuMemAlloc_v2) NOTED(cuMemAllocManaged)
NOTED(cuMemFree_v2) NOTED(cuMemcpyAsync) NOTED(cuMemsetD32Async) NOTED(cuMemsetD16Async)
NOTED(cuMemHostRegister_v2) NOTED(cuMemHostUnregister) NOTED(cuStreamCreate)
NOTED(cuStreamDestroy_v2) NOTED(cuStreamSynchronize) NOTED(cuStreamWaitEvent)
NOTED(cuEventCreate) NOTED(cuEventDestroy_v2) NOTED(cuEventSynchronize) NOTED(cuEventRecord)
NOTED(cuTensorMapEncodeTiled)
"""


@pytest.fixture(scope="module")
def driver_calls(tmp_path_factory):
    """Runs Python code with the stand-in as libcuda.so.1; returns the lines that it prints.

    In forks of a process that has loaded no driver yet.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "expected the C compiler that built the package"
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", folder / "libcuda.so.1",
                    folder / "driver.c"], check=True)

    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}

    def run(code, **variables):
        done = subprocess.run([python, "-c", textwrap.dedent(code)], env={**environment, **variables},
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    with serve_python(["moe_mlir.gpu.launch"], environment) as python:
        yield run


TWO_CALLS = """
    import sys
    from moe_mlir.gpu import cuda
    from moe_mlir.gpu.launch import LaunchPlan
    import torch
    runtime = cuda.Runtime("cuda")
    kernel = {"name": "k", "grid": [4], "block_size": 32, "dynamic_smem": int("%s")}
    plan = LaunchPlan({"name": "f", "arguments": [{"dtype": "f32", "shape": [-1]}],
                       "results": [], "kernels": [kernel]})
    function = cuda.GpuFunction(runtime, cuda.load_kernels(runtime, "text", 0), plan)
    try:
        function(torch.zeros(8))
        print("again", flush=True)
        function(torch.zeros(8))
    except cuda.GpuError as error:
        print(error)
"""


def test_calls_of_a_launch(driver_calls):
    """Shared memory is allowed once a function, whenever there is dynamic memory; a second call has
    nothing but its launch, so that a stream may capture it."""
    assert driver_calls(TWO_CALLS % 20480) == [
        "cuModuleLoadDataEx", "cuFuncSetAttribute 8 20480", "cuLaunchKernelEx", "again",
        "cuLaunchKernelEx"]


def test_a_failed_launch_names_kernel_and_arguments(driver_calls):
    *_, said = driver_calls(TWO_CALLS % 0, LAUNCH_RESULT="1")
    assert said.startswith("f on (8,): launching kernel 'k' on 4 x 1 x 1 blocks of 32 x 1 x 1 "
                           "threads with 0 bytes of dynamic shared memory: ")
    assert "cuLaunchKernelEx failed" in said and "launched before" not in said


def test_a_sticky_error_is_one_of_an_earlier_kernel(driver_calls):
    *_, said = driver_calls(TWO_CALLS % 0, LAUNCH_RESULT="700")
    assert "a kernel that was launched before has failed: CUDA_LAUNCH_BLOCKING=1 tells" in said
    later = 'import os; os.environ["LAUNCH_RESULT"] = "716"'
    *_, said = driver_calls((TWO_CALLS % 0).replace('print("again", flush=True)', later))
    assert "a kernel that was launched before has failed, the last one was 'k'" in said


def test_more_shared_memory_than_the_gpu_has(driver_calls):
    *_, said = driver_calls(TWO_CALLS % 204800)
    assert ("expected at most 232448 bytes of shared memory on this GPU, found 32768 static and "
            "204800 dynamic ones") in said and "kernel 'k'" in said


def test_the_log_of_the_driver_is_told(driver_calls):
    lines = driver_calls("""
        from moe_mlir.gpu import cuda
        try:
            cuda.Runtime("cuda").load(".target sm_90a\\n.visible .entry broken(")
        except cuda.GpuError as error:
            print(error)
    """)
    assert lines[1] == (
        "loading a module of kernels 'broken' for sm_90a on a GPU of sm_90: moe cuda runtime: "
        "cuModuleLoadDataEx failed: device kernel image is invalid")
    assert lines[2] == "ptxas: line 1: what is broken"
