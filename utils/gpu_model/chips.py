"""The rates of the chips that the model knows, each with where it comes from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    name: str
    dram: float  # bytes a second that a copy reaches
    l2_bytes: int
    sms: int = 132
    clock: float = 1.755e9
    l2: float = 7.8e12  # bytes a second
    l2_an_sm: float = 64  # bytes a cycle into one SM
    launch: float = 1.4e-6  # seconds of a launch in a graph, without what it runs
    # Clusters of 1, 2, 3 .. blocks that run at once where each block fills an SM.
    clusters: tuple = (132, 66, 39, 30, 22, 17, 15, 15)

    def reach(self, cluster: int) -> int:
        """SMs that blocks use at once which are in clusters of so many."""
        if cluster > len(self.clusters):
            return self.sms
        return cluster * self.clusters[cluster - 1]


# What was measured for reading, and 90 % of 4.8 TB/s.
H100 = Chip("H100", dram=2.98e12, l2_bytes=50 << 20)
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
| DRAM, H100 | 2.98 of 3.35 TB/s | reading 1 GiB, measured; copies reach 2.44 |
| DRAM, H200 | 4.31 of 4.8 TB/s | cub's DeviceReduce of 2^28 integers in 249.3 us (NVIDIA/cccl#9722) |
| L2 | 7.8 TB/s in all, 64 bytes a cycle into an SM | reading 8 MiB by all multiprocessors of an H100, measured |
| clusters at once, of 1 to 8 blocks that fill an SM | 132, 66, 39, 30, 22, 17, 15, 15 | `cuOccupancyMaxActiveClusters` of an H100; other dies may differ |
| L1 and shared memory | 128 bytes a cycle and SM | CUDA C++ Programming Guide |
| latencies of shared memory, L2, DRAM | 29, 263, 479 cycles | arXiv:2402.13499, unloaded; recalled and not looked up again |
| lanes a cycle and SM: FP32 FMA; integer, logic, compare; `MUFU` and conversions; loads, stores, shuffles | 128; 64; 16; 32 | CUDA C++ Programming Guide, throughput of instructions, 9.0 |
| 16-bit multiply-adds of `wgmma` a cycle and SM | 2048, of which 83 % for long | 990 TFLOP/s of the data sheet; a GEMM of 8192^3 reaches 788 on an H200, and 718 on the H100 that was measured, at 1425 MHz and 700 W |
| the same of `mma.sync` | 62 % of 2048 | arXiv:2402.13499; recalled and not looked up again |
| launch of a kernel in a graph | 1.4 us | an empty kernel on an H100, measured: 1.33 and 1.44 |
"""
