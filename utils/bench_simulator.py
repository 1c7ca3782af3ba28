"""Times the PTX simulator, all checks on, in CPU time of the calling thread.

    PYTHONPATH=BUILD/python python utils/bench_simulator.py [--repeat N]

GFLOP/s are of the kernel's matrix product, G lanes/s are 10^9 instructions
times the lanes that run them. "unchecked" is the same launch with checks off:
what the checks cost. "2 threads" is the wall time of one host thread over that
of two, which says something on a machine that is otherwise idle, and "cpu" the
CPU time of two over that of one: near 1, the threads do not disturb each other.
The router is what the compiler makes of 512 tokens and 64 experts.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_mlir import sim

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "Simulator" / "corpus" / "ptx"


@dataclass
class Workload:
    """`run` launches with the options of `sim.launch` and returns the reports."""

    name: str
    run: Callable
    flops: int = 0

    def launch(self, threads=1, checks=sim.CHECKS):
        reports = self.run(threads=threads, checks=checks)
        assert all(report.ok for report in reports), reports
        return sum(r.counters["lane_instructions"] for r in reports)

    def best(self, repeat, clock=time.thread_time, **options):
        times = []
        for _ in range(repeat):
            begin = clock()
            self.launch(**options)
            times.append(clock() - begin)
        return min(times)


def corpus(file, *launch):
    """What launches a kernel of the corpus."""
    module = sim.Module(CORPUS / f"{file}.ptx")
    return lambda **options: [module.launch(*launch, **options)]


def gemm(size):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (size, size)).astype(np.float16)
            for _ in range(2))
    d = np.zeros((size, size), np.float32)
    tiles = size // 64
    run = corpus("throughput", "tiled_gemm", (tiles, tiles), 128,
                 [a, b, d, np.int32(size), np.int32(size)])
    return Workload(f"mma.sync GEMM {size}^3", run, 2 * size**3)


def row_sums(rows, columns):
    x = np.ones((rows, columns), np.float32)
    run = corpus("throughput", "row_sum_squares", rows, 256,
                 [x, np.zeros(rows, np.float32), np.int32(columns)])
    return Workload(f"row sums {rows} x {columns}", run)


def block_sums(count):
    x = np.ones(count, np.float32)
    run = corpus("reduce", "block_sum", 64, 96,
                 [x, np.zeros(64, np.float32), np.int32(count)])
    return Workload(f"block sums of {count}", run)


ROUTER = """
func.func @route(%h: tensor<?x{d}x{t}>, %w: tensor<{e}x{d}x{t}>)
    -> (tensor<?x{k}xf32>, tensor<?x{k}xi32>) {{
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : tensor<?x{d}x{t}>
  %z0 = tensor.empty(%n) : tensor<?x{e}xf32>
  %z = moe.router_logits ins(%h, %w : tensor<?x{d}x{t}>, tensor<{e}x{d}x{t}>)
      outs(%z0 : tensor<?x{e}xf32>) -> tensor<?x{e}xf32>
  %g0 = tensor.empty(%n) : tensor<?x{k}xf32>
  %i0 = tensor.empty(%n) : tensor<?x{k}xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x{e}xf32>)
      outs(%g0, %i0 : tensor<?x{k}xf32>, tensor<?x{k}xi32>)
      -> tensor<?x{k}xf32>, tensor<?x{k}xi32>
  return %r#0, %r#1 : tensor<?x{k}xf32>, tensor<?x{k}xi32>
}}"""


def router(n, e, k, d, dtype):
    import torch

    from moe_mlir.sim.simulation import device_functions

    text = ROUTER.format(d=d, e=e, k=k,
                         t={torch.float32: "f32", torch.bfloat16: "bf16"}[dtype])
    route = device_functions(text, "sm_90")["route"]
    buffers = [torch.randn(n, d).to(dtype), torch.randn(e, d).to(dtype),
               torch.zeros(n, k), torch.zeros(n, k, dtype=torch.int32)]
    return Workload(f"router {n} x {d} {dtype}".replace("torch.", ""),
                    lambda **options: route(*buffers, **options),
                    2 * n * e * d)


def workloads():
    yield gemm(256)
    yield gemm(512)
    yield row_sums(64, 16384)
    yield block_sums(1 << 20)
    try:
        import torch
    except ImportError as error:
        print(f"no router: {error}")
        return
    yield router(512, 64, 8, 256, torch.float32)
    yield router(512, 64, 8, 256, torch.bfloat16)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=10)
    repeat = parser.parse_args().repeat
    print(f"{'':28}{'ms':>8}{'GFLOP/s':>9}{'G lanes/s':>11}"
          f"{'unchecked ms':>14}{'2 threads':>11}{'cpu':>6}")
    for work in workloads():
        lanes = work.launch()
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
