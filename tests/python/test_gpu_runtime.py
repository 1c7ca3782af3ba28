"""The mgpu* ABI that lowered host code calls, on the simulator and on CUDA."""

import ctypes
import os
import pathlib

import numpy as np
import pytest

PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 factor, .param .u32 n) {
  .reg .pred %p;
  .reg .b32 %r<4>;
  .reg .f32 %f<3>;
  .reg .b64 %rd<3>;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r1, %r1, %r2, %r3;
  ld.param.u32 %r2, [n];
  setp.ge.s32 %p, %r1, %r2;
  @%p ret;
  ld.param.u64 %rd1, [x];
  mul.wide.s32 %rd2, %r1, 4;
  add.s64 %rd1, %rd1, %rd2;
  ld.global.f32 %f1, [%rd1];
  ld.param.f32 %f2, [factor];
  mul.rn.f32 %f1, %f1, %f2;
  st.global.f32 [%rd1], %f1;
  ret;
}
"""


def runtime(kind):
    """The runtime library, beside the simulator's."""
    import moe_mlir

    directory = pathlib.Path(
        os.environ.get("MOE_MLIR_SIM_LIBRARY", moe_mlir.__file__)
    ).parent
    path = directory / f"libmoe_{kind}_runtime.so"
    if not path.exists():
        pytest.skip(f"{path.name} is not built")
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    for name in ("ModuleLoadJIT", "ModuleGetFunction", "MemAlloc",
                 "StreamCreate"):
        getattr(library, "mgpu" + name).restype = pointer
    library.moe_gpu_unavailable.restype = ctypes.c_char_p
    library.moe_gpu_report.restype = ctypes.c_char_p
    library.moe_gpu_num_findings.restype = ctypes.c_uint64
    return library


def launch_scale(library, host, n):
    """Scales the first n elements of `host` by 3 on the device."""
    p, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    stream = p(library.mgpuStreamCreate())
    module = p(library.mgpuModuleLoadJIT(PTX, 2, i64(len(PTX))))
    function = p(library.mgpuModuleGetFunction(module, b"scale"))
    device = p(library.mgpuMemAlloc(ctypes.c_uint64(host.nbytes), stream,
                                    ctypes.c_bool(False)))
    data = p(host.ctypes.data)
    size = ctypes.c_size_t(host.nbytes)
    library.mgpuMemcpy(device, data, size, stream)
    values = [device, ctypes.c_float(3.0), ctypes.c_int32(n)]
    params = (p * len(values))(*[ctypes.addressof(v) for v in values])
    blocks = i64(-(-n // 32))
    library.mgpuLaunchKernel(function, blocks, i64(1), i64(1), i64(32), i64(1),
                             i64(1), i32(0), stream, params, None, i64(3))
    library.mgpuMemcpy(data, device, size, stream)
    library.mgpuStreamSynchronize(stream)
    library.mgpuMemFree(device, stream)
    library.mgpuModuleUnload(module)
    library.mgpuStreamDestroy(stream)


def available(kind):
    library = runtime(kind)
    reason = library.moe_gpu_unavailable()
    if reason:
        pytest.skip(reason.decode())
    return library


@pytest.mark.parametrize("kind", ["sim", "cuda"])
def test_runs_a_kernel(kind):
    library = available(kind)
    host = np.arange(100, dtype=np.float32)
    launch_scale(library, host, 100)
    assert np.array_equal(host, 3 * np.arange(100, dtype=np.float32))
    assert library.moe_gpu_num_findings() == 0


def test_simulator_reports_what_the_kernel_does_wrong(capfd):
    library = available("sim")
    before = library.moe_gpu_num_findings()
    launch_scale(library, np.zeros(31, np.float32), 32)
    assert library.moe_gpu_num_findings() == before + 2
    report = library.moe_gpu_report().decode()
    assert "loads 4 bytes at 4 bytes past the end of allocation" in report
    assert "stores 4 bytes" in capfd.readouterr().err


def test_cuda_says_why_it_is_unavailable():
    reason = runtime("cuda").moe_gpu_unavailable()
    assert reason is None or reason.startswith(b"expected")
