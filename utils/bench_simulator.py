"""Times the PTX simulator, all checks on, in CPU time of the calling thread.

    PYTHONPATH=BUILD/python python utils/bench_simulator.py [--repeat N]

GFLOP/s are of the kernel's matrix product, G lanes/s are 10^9 instructions
times the lanes that run them. "unchecked" is the same launch with checks off:
what the checks cost. "2 threads" is the wall time of one host thread over that
of two, which says something on a machine that is otherwise idle, and "cpu" the
CPU time of two over that of one: near 1, the threads do not disturb each other.
The router is what the compiler makes of 512 tokens and 64 experts; it needs
moe-opt.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from moe_mlir import sim

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "Simulator" / "corpus" / "ptx"


@dataclass
class Workload:
    name: str
    module: sim.Module
    kernel: str
    grid: tuple
    block: tuple
    args: list
    flops: int = 0

    def launch(self, threads=1, checks=sim.CHECKS):
        report = self.module.launch(self.kernel, self.grid, self.block,
                                    self.args, threads=threads, checks=checks)
        assert report.ok, str(report)
        return report

    def best(self, repeat, clock=time.thread_time, **options):
        times = []
        for _ in range(repeat):
            begin = clock()
            self.launch(**options)
            times.append(clock() - begin)
        return min(times)


def gemm(size):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (size, size)).astype(np.float16)
            for _ in range(2))
    d = np.zeros((size, size), np.float32)
    tiles = size // 64
    return Workload(f"mma.sync GEMM {size}^3", load("throughput"), "tiled_gemm",
                    (tiles, tiles, 1), (128, 1, 1),
                    [a, b, d, np.int32(size), np.int32(size)], 2 * size**3)


def row_sums(rows, columns):
    x = np.ones((rows, columns), np.float32)
    return Workload(f"row sums {rows} x {columns}", load("throughput"),
                    "row_sum_squares", (rows, 1, 1), (256, 1, 1),
                    [x, np.zeros(rows, np.float32), np.int32(columns)])


def block_sums(count):
    x = np.ones(count, np.float32)
    return Workload(f"block sums of {count}", load("reduce"), "block_sum",
                    (64, 1, 1), (96, 1, 1),
                    [x, np.zeros(64, np.float32), np.int32(count)])


def router(tokens, experts, chosen, features, dtype):
    import torch

    sys.path.insert(0, str(ROOT / "tests" / "python" / "gpu"))
    from kernels import compile_kernels
    from test_router import module_text

    (kernel,) = compile_kernels(
        module_text(experts, features, chosen, dtype=dtype, bias=False))
    h, w = (torch.randn(n, features).to(dtype) for n in (tokens, experts))
    outputs = [torch.zeros(tokens, chosen),
               torch.zeros(tokens, chosen, dtype=torch.int32)]
    return Workload(
        f"router {tokens} x {features} {dtype}".replace("torch.", ""),
        sim.Module(kernel.ptx), kernel.name, kernel.grid_for([tokens] * 3),
        (kernel.block_size, 1, 1), [h, w, *outputs, *[tokens] * 3],
        2 * tokens * experts * features)


def load(name):
    return sim.Module(CORPUS / f"{name}.ptx")


def workloads():
    yield gemm(256)
    yield gemm(512)
    yield row_sums(64, 16384)
    yield block_sums(1 << 20)
    try:
        import torch

        yield router(512, 64, 8, 256, torch.float32)
        yield router(512, 64, 8, 256, torch.bfloat16)
    except (ImportError, FileNotFoundError) as error:
        print(f"no router: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    repeat = parser.parse_args().repeat
    print(f"{'':28}{'ms':>8}{'GFLOP/s':>9}{'G lanes/s':>11}"
          f"{'unchecked ms':>14}{'2 threads':>11}{'cpu':>6}")
    for work in workloads():
        lanes = work.launch().counters["lane_instructions"]
        seconds = work.best(repeat)
        unchecked = work.best(repeat, checks=())
        one, two = (work.best(repeat, time.perf_counter, threads=n)
                    for n in (1, 2))
        both = work.best(repeat, time.process_time, threads=2)
        flops = f"{work.flops / seconds / 1e9:.2f}" if work.flops else ""
        print(f"{work.name:28}{seconds * 1e3:8.1f}{flops:>9}"
              f"{lanes / seconds / 1e9:11.2f}{unchecked * 1e3:14.1f}"
              f"{one / two:10.2f}x{both / seconds:6.2f}", flush=True)


if __name__ == "__main__":
    main()
