"""Times of calls on a GPU, and what bounds them: launches, memory, L2, exponentials, products.

Calls are captured 20 to 64 times in a CUDA graph over inputs that rotate through more than
the L2 cache, so what is timed is the kernels and not their launch from Python.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import clusters, machine
from .ptx import kernel
from .target import Target

_CALLS = 20
_MAX_CALLS = 64
_REPLAYS = 15
ROTATED_BYTES = 150 << 20
_EX2_LOOP = 4096


def rotated(make: Callable[[], list[torch.Tensor]], bytes_of_one: int) -> list:
    """Inputs by `make()`, so many that a cache of 60 MB holds none until its next turn."""
    count = max(2, min(_MAX_CALLS, ROTATED_BYTES // max(1, bytes_of_one) + 1))
    return [make() for _ in range(count)]


def samples(call: Callable[..., object], inputs: Sequence[Sequence[Any]]) -> list[float]:
    """Microseconds of one call, of each replay of a graph of many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*inputs[0])
        with _waits_are_errors():
            call(*inputs[-1])
    stream.synchronize()
    calls = max(_CALLS, min(_MAX_CALLS, len(inputs)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*inputs[i % len(inputs)]) for i in range(calls)]
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(round(1000 * start.elapsed_time(end) / calls, 3))
    del kept
    return times


@contextlib.contextmanager
def _waits_are_errors():
    """What waits for the GPU is refused here, since a capture that fails may spoil the allocator."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_microseconds(call: Callable[[], object], calls: int = 200) -> float:
    """Of one call as Python makes it, the GPU keeping up."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


class Limits:
    """The rates of this GPU, measured where the times are."""

    name, group, limit, model = "limits", "times", 40.0, 6.0

    def run(self, target: Target) -> dict:
        with target.active():
            if target.device != "cuda":
                _exponentials(target, 1)
                return {"not_run": "the simulator has no times"}
            return {"limits": self._measure(target)}

    def _measure(self, target) -> dict:
        import moe_mlir

        a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
        product = statistics.median(samples(lambda a, b: a @ b, [(a, b)]))
        blocks = 16 * torch.cuda.get_device_properties(0).multi_processor_count
        exponentials = statistics.median(samples(lambda: _exponentials(target, blocks), [()]))
        z = torch.randn(64, 64, device="cuda")
        empty = kernel([1], 1, "mov.b32 r0, v0_0;")
        word = torch.zeros(128, dtype=torch.int32, device="cuda")

        def launch():
            target.run_ptx(empty, "k", [word, word], block=128)

        return {
            "bytes_per_second": _copy_rate(1 << 30),
            "l2_bytes_per_second": _copy_rate(8 << 20),
            "bytes_read_per_second": _read_rate(target, 1 << 30),
            "l2_bytes_read_per_second": _read_rate(target, 8 << 20),
            "active_clusters": clusters.most_active(),
            "operations_per_second": 2 * 8192**3 / product * 1e6,
            "exponentials_per_second": blocks * 128 * 4 * _EX2_LOOP / exponentials * 1e6,
            "launch_us": statistics.median(samples(launch, [()])),
            "host_launch_us": host_microseconds(launch),
            "host_op_us": host_microseconds(lambda: moe_mlir.topk_renorm(z, 8)),
            "host_torch_op_us": host_microseconds(lambda: z.softmax(-1)),
            "under_load": _state_under_load(lambda: a @ b, product),
        }


def _state_under_load(call, microseconds) -> str:
    """Driver, clocks, power and temperature while the GPU computes for two seconds."""
    for _ in range(int(2e6 / microseconds)):
        call()
    state = machine.nvidia_smi("--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm,"
                               "power.draw,temperature.gpu", "--format=csv")
    torch.cuda.synchronize()
    return state


def _copy_rate(size: int) -> float:
    source = torch.zeros(size // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / statistics.median(samples(lambda a, b: b.copy_(a), [(source, target)])) * 1e6


def _read_rate(target, size: int) -> float:
    """Bytes that all multiprocessors read in a second, past their L1, of a buffer of this size."""
    threads, loads = 132 * 8 * 256, 64
    body = [".reg .b64 %from, %offset; .reg .b32 %t; .reg .pred %p;",
            ".reg .b32 q<16>;", "mov.b32 r0, 0;", "mov.b32 %t, 0;",
            "mul.wide.u32 %offset, %i, 16;", "LOOP:"]
    for turn in range(4):
        body += [f"and.b64 %from, %offset, {size - 1};", "add.u64 %from, %from, %base;",
                 f"ld.global.cg.v4.b32 {{{', '.join(f'q{4 * turn + w}' for w in range(4))}}}, [%from];",
                 f"add.u64 %offset, %offset, {16 * threads};"]
    body += [f"xor.b32 r0, r0, q{w};" for w in range(16)]
    body += [f"add.u32 %t, %t, 4; setp.lt.u32 %p, %t, {loads}; @%p bra LOOP;"]
    ptx = kernel([1], 1, "\n".join(body), registers=".reg .b64 %base; ld.param.u64 %base, [p0];")
    source = torch.zeros(max(size // 4, threads), dtype=torch.int32, device="cuda")
    result = torch.empty(threads, dtype=torch.int32, device="cuda")
    call = functools.partial(target.run_ptx, ptx, "k", grid=(132 * 8,), block=256)
    seconds = statistics.median(samples(lambda a, b: call([a, b]), [(source, result)])) * 1e-6
    return 16 * threads * loads / seconds


def _exponentials(target, blocks: int) -> None:
    """Four independent ex2 a turn in each thread."""
    turns = _EX2_LOOP if target.device == "cuda" else 2
    body = [".reg .b32 %t; .reg .pred %p;", "mov.b32 %t, 0;"]
    body += [f"add.f32 r{w}, v0_0, 0f{0x3F800000 + w:08X};" for w in range(4)]
    body += ["LOOP:", *(f"ex2.approx.ftz.f32 r{w}, r{w}; neg.f32 r{w}, r{w};" for w in range(4)),
             f"add.u32 %t, %t, 1; setp.lt.u32 %p, %t, {turns}; @%p bra LOOP;"]
    device = target.torch_device
    words = torch.zeros(128 * blocks, dtype=torch.int32, device=device)
    target.run_ptx(kernel([1], 4, "\n".join(body)), "k",
                   [words, words.new_empty(512 * blocks)], grid=(blocks,), block=128)
