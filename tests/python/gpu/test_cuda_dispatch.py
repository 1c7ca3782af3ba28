"""The way of CUDA tensors, as far as it goes without a GPU: the launcher on the simulator's
runtime, which has the same interface as the driver's, and shapes and devices on fake tensors."""

import ctypes
import re

import pytest
import torch
from test_every_op import CASES, judge, operands
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_mlir
from moe_mlir.compiler import jit
from moe_mlir.gpu import cuda
from moe_mlir.ops import _library
from moe_mlir.sim.simulation import Simulation


@pytest.fixture(scope="module")
def runtime():
    return cuda.Runtime("sim")


def registered(library, tensors):
    """The simulator knows the memory that kernels may touch."""
    for tensor in tensors:
        if tensor.numel():
            library.mgpuMemHostRegister(ctypes.c_void_p(tensor.data_ptr()),
                                        ctypes.c_uint64(tensor.numel() * tensor.element_size()))
    return tensors


@pytest.fixture
def on_simulated_driver(runtime, monkeypatch):
    """Sends what `simulate` would run to the launcher for CUDA tensors."""
    empty = torch.empty
    ran = []

    def run(self, kernel, tensors):
        registered(runtime.library, tensors)
        function = cuda.gpu_functions(runtime, kernel.text(), self.chip)[kernel.op]
        ran.append(function(*tensors))

    def registered_empty(*size, **options):
        return registered(runtime.library, [empty(*size, **options)])[0]

    monkeypatch.setattr(Simulation, "run", run)
    monkeypatch.setattr(torch, "empty", registered_empty)
    return ran


@pytest.mark.parametrize("op", CASES)
def test_launcher_gives_the_meaning_of_the_op(op, runtime, on_simulated_driver):
    before = runtime.library.moe_gpu_num_findings()
    with moe_mlir.simulate(chip="sm_80"):
        found = CASES[op](operands())
    assert on_simulated_driver and runtime.library.moe_gpu_num_findings() == before
    judge(op, found)


@pytest.mark.parametrize("op", CASES)
def test_everything_stays_on_the_device(op, monkeypatch):
    """Every buffer that reaches the launcher, and every result, is on the GPU."""
    seen = []
    monkeypatch.setattr(cuda, "run", lambda text, name, tensors: seen.extend(tensors))
    # Below the dispatcher, where the ops' fake kernels would answer.
    monkeypatch.setattr(_library, "are_plain", lambda args: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = {name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cuda")
                 for name, v in operands().items()}
        results = CASES[op](given)
    results = (results,) if isinstance(results, torch.Tensor) else results
    assert seen and {t.device.type for t in [*seen, *results]} == {"cuda"}


def test_mixed_devices_are_refused():
    from moe_mlir.ops.topk_renorm import kernel

    run = kernel(torch.float32, 8, 2, "logits", True, 1.0, True, torch.int64)
    with FakeTensorMode():
        scores = torch.empty(4, 8, device="cuda")
        mask = torch.empty(4, dtype=torch.bool)
        with pytest.raises(ValueError, match="expected 'mask' on cuda:0 as 'scores', found cpu"):
            run(scores, mask)


def test_chips():
    assert cuda.chip_for((9, 0)) == "sm_90a" and cuda.chip_for((12, 1)) == "sm_120"
    with pytest.raises(cuda.GpuError, match="compute capability 8.0 or later, found 7.5"):
        cuda.chip_for((7, 5))


def test_packed_kernels_of_its_own_chip_come_first(tmp_path, monkeypatch):
    """And those run nowhere else: a later chip takes what an earlier one does."""
    from moe_mlir.ops.topk_renorm import kernel

    text = kernel(torch.float32, 8, 2, "logits", True, 1.0, False, torch.int64).text()
    for chip in ("sm_80", "sm_90", "sm_90a"):
        jit.pack_kernels(text, chip, tmp_path)
    monkeypatch.setenv("MOE_MLIR_KERNELS", str(tmp_path))

    def target(chip):
        return re.search(r"\.target (\w+)", jit.compile_kernels_cached(text, chip))[1]

    assert [target(chip) for chip in ("sm_89", "sm_90", "sm_90a", "sm_100")] == [
        "sm_80", "sm_90", "sm_90a", "sm_90"]


def test_damaged_ptx_is_an_error_not_an_abort(runtime):
    with pytest.raises(cuda.GpuError):
        runtime.load(".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry f() { nop")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_driver_the_reason_is_given():
    with pytest.raises(cuda.GpuError, match="cannot run kernels on a GPU: expected"):
        cuda.Runtime("cuda")
