"""The rates of the chips that the model knows, each with where it comes from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    name: str
    dram: float  # bytes a second that a copy reaches
    l2_bytes: int
    sms: int = 132
    clock: float = 1.755e9
    l2: float = 5.5e12  # bytes a second
    l2_an_sm: float = 64  # bytes a cycle into one SM
    launch: float = 0.8e-6  # seconds of a launch in a graph, without what it runs


# 92 % of 3.35 and 90 % of 4.8 TB/s.
H100 = Chip("H100", dram=3.09e12, l2_bytes=50 << 20)
H200 = Chip("H200", dram=4.31e12, l2_bytes=50 << 20)
CHIPS = (H100, H200)

L1_BYTES_A_CYCLE = 128
SCHEDULERS = 4  # of an SM; each issues one instruction a cycle

# Cycles from issue to result of one warp alone.
SHARED_LATENCY, L2_LATENCY, DRAM_LATENCY = 29, 263, 479
BARRIER_LATENCY, CLUSTER_BARRIER_LATENCY = 20, 190
FENCE_LATENCY, BLOCK_FENCE_LATENCY = 600, 30  # for the chip, for a block
MMA_LATENCY, WGMMA_LATENCY = 33, 60

# What of the peak of wgmma a large product keeps up within the chip's power.
TENSOR_SUSTAINED = 0.83
# And what of that peak mma.sync of warps can reach.
MMA_SYNC_SHARE = 0.62
# Multiply-adds of 16 bits a cycle and SM.
TENSOR_RATE = 2048

SOURCES = """\
| constant | value | from |
|---|---|---|
| SMs, clock, schedulers an SM | 132, 1.755 GHz, 4 | NVIDIA's data sheets of H100 and H200 SXM (boost clock under load) |
| DRAM, H100 | 3.09 of 3.35 TB/s | what copies of large buffers reach, 92 %; no single source |
| DRAM, H200 | 4.31 of 4.8 TB/s | cub's DeviceReduce of 2^28 integers in 249.3 us (NVIDIA/cccl#9722) |
| L2 | 5.5 TB/s in all, 64 bytes a cycle into an SM | microbenchmarks of H100, recalled and not looked up again |
| L1 and shared memory | 128 bytes a cycle and SM | CUDA C++ Programming Guide |
| latencies of shared memory, L2, DRAM | 29, 263, 479 cycles | arXiv:2402.13499, unloaded; recalled and not looked up again |
| lanes a cycle and SM: FP32 FMA; integer, logic, compare; `MUFU` and conversions; loads, stores, shuffles | 128; 64; 16; 32 | CUDA C++ Programming Guide, throughput of instructions, 9.0 |
| 16-bit multiply-adds of `wgmma` a cycle and SM | 2048, of which 83 % for long | 990 TFLOP/s of the data sheet; a GEMM of 8192^3 reaches 788 on an H200 |
| the same of `mma.sync` | 62 % of 2048 | arXiv:2402.13499; recalled and not looked up again |
| launch of a kernel in a graph | 0.8 us | chosen by the routers of 1 and 64 tokens below |
"""
