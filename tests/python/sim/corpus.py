"""The corpus of correct kernels: inputs from a seed, launch, reference.

Every case names a kernel of ``tests/Simulator/corpus/ptx``, how it is launched,
and a function that makes its arguments and the expectation on each output.
Sizes are odd on purpose: a bound that is off by one must show.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
from moe_mlir import sim

PTX = Path(__file__).parents[2] / "Simulator" / "corpus" / "ptx"


@dataclass(frozen=True)
class Case:
    """One kernel and its launches, one for each of `sizes`.

    ``build(rng, *size)`` gives (args, {index: check}); a check takes the output
    array and says whether it is right.
    """

    file: str
    kernel: str
    grid: Callable | tuple
    block: tuple
    build: Callable
    sizes: tuple = ((),)
    dynamic_smem: Callable | int = 0
    cluster: tuple | None = None

    @property
    def name(self):
        return f"{self.file}:{self.kernel}"

    @property
    def path(self):
        return PTX / f"{self.file}.ptx"

    def launch(self, seed, policy, *, data=0, module=None, **options):
        """Returns (report, argument arrays, indices of the wrong outputs).

        `data` chooses the size and seeds the inputs.
        """
        size = self.sizes[data % len(self.sizes)]
        args, checks = self.build(np.random.default_rng(data), *size)
        smem = self.dynamic_smem
        report = sim.launch(
            module or load(self.file),
            self.kernel,
            self.grid(*size) if callable(self.grid) else self.grid,
            self.block,
            args,
            dynamic_smem=smem(*size) if callable(smem) else smem,
            cluster=self.cluster,
            seed=seed,
            policy=policy,
            **options,
        )
        arrays = [getattr(arg, "array", arg) for arg in args]
        wrong = [i for i, check in checks.items() if not check(arrays[i])]
        return report, arrays, wrong


@functools.cache
def load(file):
    return sim.Module(PTX / f"{file}.ptx")


CASES: list[Case] = []


def case(file, kernel, grid, block, *, sizes=((),), smem=0, cluster=None):
    def triple(size):
        size = (size,) if isinstance(size, int) else tuple(size)
        return size + (1,) * (3 - len(size))

    def register(build):
        CASES.append(
            Case(file, kernel, grid if callable(grid) else triple(grid),
                 triple(block), build,
                 tuple(s if isinstance(s, tuple) else (s,) for s in sizes),
                 smem, triple(cluster) if cluster else None)
        )
        return build

    return register


def exact(reference):
    return lambda out: np.array_equal(out, reference)


def close(reference, rtol=1e-5, atol=1e-6):
    return lambda out: np.allclose(out, reference, rtol, atol)


def integers(rng, low, high, *shape, dtype=np.int32):
    return rng.integers(low, high, shape, dtype=dtype)


def normals(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# --- reductions --------------------------------------------------------------


@case("reduce", "block_sum", 3, 96, sizes=(1001, 5, 0, 288))
def block_sum(rng, n):
    threads = 3 * 96
    x = integers(rng, -8, 9, n).astype(np.float32)  # sums are exact
    padded = np.pad(x, (0, -n % threads)).reshape(-1, 3, 96)
    return [x, np.zeros(3, np.float32), np.int32(n)], {
        1: exact(padded.sum((0, 2)))
    }


@case("reduce", "tree_max", 3, 256, sizes=(700, 513))
def tree_max(rng, n):
    x = integers(rng, -1000, 1000, n)
    ref = [x[:256].max(), x[256:512].max(), x[512:].max()]
    return [x, np.zeros(3, np.int32), np.int32(n)], {1: exact(ref)}


@case("reduce", "syncwarp_sum", 2, 64)
def syncwarp_sum(rng):
    x = integers(rng, -1000, 1000, 128)
    return [x, np.zeros(4, np.int32)], {1: exact(x.reshape(4, 32).sum(1))}


@case("reduce", "redux_rows", 3, 64, sizes=(5, 4))
def redux_rows(rng, rows):
    x = integers(rng, -(2**20), 2**20, rows, 32)
    ref = np.stack(
        [x.sum(1), x.min(1), x.max(1), np.bitwise_or.reduce(x, 1)], 1
    )
    return [x, np.zeros((rows, 4), np.int32), np.int32(rows)], {1: exact(ref)}


@case("reduce", "last_block_sum", lambda n, blocks: (blocks, 1, 1), 64,
      sizes=((4200, 66), (200, 4), (65, 2)))
def last_block_sum(rng, n, blocks):
    x = integers(rng, -1000, 1000, n)
    zeros = np.zeros
    return [x, zeros(blocks, np.int32), zeros(1, np.uint32),
            zeros(1, np.int32), np.int32(n)], {3: exact([x.sum()])}


@case("reduce", "last_block_acq_rel", 4, 64, sizes=(230, 193))
def last_block_acq_rel(rng, n):
    x = integers(rng, -1000, 1000, n)
    ref = np.pad(x, (0, 256 - n)).reshape(4, 64).sum(0) * 2
    zeros = np.zeros
    return [x, zeros(256, np.int32), zeros(1, np.uint32),
            zeros(64, np.int32), np.int32(n)], {3: exact(ref)}


@case("reduce", "atomic_sum", 4, 64)
def atomic_sum(rng):
    x = integers(rng, -8, 9, 230).astype(np.float32)
    ref = np.pad(x, (0, 1)).reshape(-1, 11).sum(0)
    return [x, np.zeros(11, np.float32), np.int32(230), np.int32(11)], {
        1: exact(ref)
    }


# --- scans -------------------------------------------------------------------


@case("scan", "warp_scan", 2, 64)
def warp_scan(rng):
    x = integers(rng, -100, 100, 4, 32)
    return [x, np.zeros_like(x)], {1: exact(x.cumsum(1))}


@case("scan", "block_scan", 1, 128, sizes=(333, 1, 0, 256))
def block_scan(rng, n):
    x = integers(rng, -100, 100, n)
    return [x, np.zeros_like(x), np.int32(n)], {1: exact(x.cumsum())}


@case("scan", "hillis_steele_scan", 2, 128)
def hillis_steele_scan(rng):
    x = integers(rng, -8, 9, 2, 128).astype(np.float32)
    return [x, np.zeros_like(x)], {1: exact(x.cumsum(1))}


@case("scan", "lookback_scan", 6, 128, sizes=(701, 641))
def lookback_scan(rng, n):
    x = integers(rng, -100, 100, n)
    return [x, np.zeros_like(x), np.zeros(6, np.uint64),
            np.zeros(1, np.uint32), np.int32(n)], {1: exact(x.cumsum())}


@case("scan", "lookback_fence_scan", 6, 128, sizes=(701, 641))
def lookback_fence_scan(rng, n):
    x = integers(rng, -100, 100, n)
    return [x, np.zeros_like(x), np.zeros(6, np.int32), np.zeros(6, np.int32),
            np.zeros(1, np.uint32), np.int32(n)], {1: exact(x.cumsum())}


# --- sorts -------------------------------------------------------------------


@case("sort", "bitonic_sort", 2, 128)
def bitonic_sort(rng):
    x = integers(rng, 0, 2**32, 2, 256, dtype=np.uint32)
    return [x], {0: exact(np.sort(x, 1))}


@case("sort", "radix_sort", 2, 128, sizes=(6, 1, 0))
def radix_sort(rng, bits):
    x = integers(rng, 0, 2**6, 2, 128, dtype=np.uint32)
    order = np.argsort(x % 2**bits, 1, kind="stable")
    return [x, np.zeros((2, 128), np.int32), np.int32(bits)], {
        0: exact(np.take_along_axis(x, order, 1)),
        1: exact(order),
    }


@case("cub", "cub_radix_sort", 2, 64)
def cub_radix_sort(rng):
    x = np.round(normals(rng, 2, 128) * 8) / 8 + np.float32(0)  # no -0, ties
    bits = x.view(np.uint32)
    bits[:, 77] = 0xFFFFFFFF  # a NaN that is less than everything
    keys = np.where(bits >> 31, ~bits, bits | 0x80000000)
    order = np.argsort(keys, 1, kind="stable")
    return [bits, np.zeros_like(bits), np.zeros((2, 128), np.int32)], {
        1: exact(np.take_along_axis(bits, order, 1)),
        2: exact(order),
    }


@case("cub", "cub_scan", 2, 128)
def cub_scan(rng):
    x = integers(rng, -100, 100, 2, 128)
    return [x, np.zeros_like(x), np.zeros(2, np.int32)], {
        1: exact(x.cumsum(1) - x),
        2: exact(x.sum(1)),
    }


@case("cub", "cub_reduce", 2, 128)
def cub_reduce(rng):
    x = integers(rng, -8, 9, 2, 128).astype(np.float32)
    return [x, np.zeros(2, np.float32)], {1: exact(x.sum(1))}


# --- counting ----------------------------------------------------------------


@case("histogram", "histogram", 3, 64, smem=lambda n, e: 4 * e,
      sizes=((1000, 77), (5, 20), (0, 128)))
def histogram(rng, n, e):
    bins = integers(rng, 0, e, n)
    return [bins, np.zeros(e, np.int32), np.int32(n), np.int32(e)], {
        1: exact(np.bincount(bins, minlength=e))
    }


@case("histogram", "slots", 4, 64)
def slots(rng):
    bins = integers(rng, 0, 7, 231)

    def check(slot):  # which token gets which slot is free
        return all(
            np.array_equal(np.sort(slot[bins == b]), np.arange(sum(bins == b)))
            for b in range(7)
        )

    return [bins, np.zeros(7, np.int32), np.zeros(231, np.int32),
            np.int32(231)], {1: exact(np.bincount(bins, minlength=7)),
                             2: check}


@case("histogram", "narrow_stores", 2, 64)
def narrow_stores(rng):
    x = integers(rng, 0, 256, 2, 64)
    swapped = x.reshape(2, 32, 2)[:, :, ::-1].reshape(2, 64)
    return [x, np.zeros((2, 64), np.uint8), np.zeros((2, 64), np.uint16)], {
        1: exact(x[:, ::-1]),
        2: exact(swapped * 3),
    }


@case("histogram", "locked_minimum", 2, 64)
def locked_minimum(rng):
    x = integers(rng, -20, 20, 2, 64)
    return [x, np.zeros((2, 2), np.int32)], {
        1: exact(np.stack([x.min(1), x.argmin(1)], 1))
    }


# --- softmax and routing -----------------------------------------------------


def softmax_reference(x):
    if not x.size:
        return x
    x = x.astype(np.float64)
    p = np.exp(x - x.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


@case("softmax", "warp_softmax", 3, 64, sizes=((5, 51), (4, 20)))
def warp_softmax(rng, rows, cols):
    x = normals(rng, rows, cols) * 4
    return [x, np.zeros_like(x), np.int32(rows), np.int32(cols)], {
        1: close(softmax_reference(x))
    }


@case("softmax", "block_softmax", 3, 128, sizes=(333, 100))
def block_softmax(rng, cols):
    x = normals(rng, 3, cols) * 4
    return [x, np.zeros_like(x), np.int32(cols)], {
        1: close(softmax_reference(x))
    }


@case("router", "topk_router", 5, 64, smem=lambda n, e, k: 4 * e,
      sizes=((9, 47, 3), (8, 20, 1), (1, 64, 2), (3, 9, 0)))
def topk_router(rng, n, e, k):
    x = np.round(normals(rng, n, e) * 4) / 4 + np.float32(0)  # many ties
    experts = np.argsort(-x, 1, kind="stable")[:, :k]
    weights = softmax_reference(np.take_along_axis(x, experts, 1))
    return [x, np.zeros((n, k), np.int32), np.zeros((n, k), np.float32),
            np.zeros(e, np.int32), np.int32(n), np.int32(e), np.int32(k)], {
        1: exact(experts),
        2: close(weights),
        3: exact(np.bincount(experts.ravel(), minlength=e)),
    }


# --- the language ------------------------------------------------------------


@case("language", "calls", 2, 64)
def calls(rng):
    weights, table = [3, -1, 4, 1, -5, 9, 2, -6], [10, 20, 30, 40]
    x = integers(rng, -9, 10, 128)
    ref = []
    for i, v in enumerate(x.tolist()):
        a, b, c = sorted([v, weights[i % 8], table[i % 4]])
        ref += [a * 10000 + b * 100 + c, v ** (i % 7)]
    return [x, np.zeros(256, np.int32)], {1: exact(ref)}


@case("language", "divergent", 2, 64)
def divergent(rng):
    x = integers(rng, 0, 2**32, 128, dtype=np.uint32)
    steps = [
        lambda v: v * 3 + 1,
        lambda v: v ^ v >> 3,
        lambda v: int(f"{v:032b}"[::-1], 2),
        lambda v: v - 77,
        lambda v: v.bit_count() * 1001,
        lambda v: v // 7,
        lambda v: 32 - v.bit_length() + (v << 2),
        lambda v: ~v,
    ]

    def run(v):
        turn = 0
        while turn <= v % 5:
            v = steps[(v + turn) % 2**32 % 8](v) % 2**32
            turn += 1
        return v

    return [x, np.zeros_like(x)], {1: exact([run(v) for v in x.tolist()])}


@case("language", "wide", 2, 32)
def wide(rng):
    a = integers(rng, -(2**62), 2**62, 64, dtype=np.int64)
    b = integers(rng, 1, 2**40, 64, dtype=np.int64)
    b *= np.where(np.arange(64) % 2, 1, -1)
    a[::3] >>= 40  # nvcc divides 32-bit values apart
    b[::6] >>= 20
    b[b == 0] = 1
    ref = []
    for u, v in zip(a.tolist(), b.tolist()):
        q = abs(u) // abs(v) * (1 if (u < 0) == (v < 0) else -1)
        ref.append([q, u - q * v, u * v >> 64, u % 2**64 % 1000003])
    return [a, b, np.zeros((64, 4), np.int64)], {2: exact(ref)}


@case("language", "doubles", 2, 32)
def doubles(rng):
    x = rng.standard_normal(61) * 10
    ref = np.sqrt(np.abs(x)) / (1 + x * x) + np.floor(x)
    return [x, np.zeros_like(x), np.int32(61)], {1: close(ref, 1e-15, 0)}


# --- matrix products ---------------------------------------------------------


def bf16(x):
    """The bits of float32 values that bf16 holds exactly."""
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def e4m3(x):
    """The bits of integers in [-16, 16] as e4m3."""
    x = np.asarray(x)
    mantissa, exponent = np.frexp(np.abs(x))  # |x| = mantissa * 2^exponent
    bits = (exponent + 6 << 3) + np.round(mantissa * 16 - 8).astype(int)
    return (np.where(x == 0, 0, bits) + 128 * (x < 0)).astype(np.uint8)


def gemm(kernel, encode, dtype, step, file="gemm"):
    # Small integers: every format holds them, every sum is exact.
    @case(file, kernel, (2, 2), 128, sizes=(3, 1, 0))
    def build(rng, steps):
        m, n, k = 64, 64, steps * step
        a = integers(rng, -4, 5, m, k)
        b = integers(rng, -4, 5, n, k)
        return [encode(a), encode(b), np.zeros((m, n), dtype), np.int32(n),
                np.int32(steps)], {2: exact(a @ b.T)}


def cast(dtype):
    return lambda x: x.astype(dtype)


gemm("gemm_f16", cast(np.float16), np.float32, 16)
gemm("gemm_bf16", bf16, np.float32, 16)
gemm("gemm_tf32", cast(np.float32), np.float32, 8)
gemm("gemm_s8", cast(np.int8), np.int32, 32)
gemm("gemm_e4m3", e4m3, np.float32, 32, file="gemm_fp8")


@case("gemm", "gemm_transposed", (2, 2), 64, sizes=(3, 1, 0))
def gemm_transposed(rng, steps):
    k = steps * 16
    a, b = integers(rng, -4, 5, 32, k), integers(rng, -4, 5, k, 32)
    return [a.astype(np.float16), b.astype(np.float16),
            np.zeros((32, 32), np.float32), np.int32(32), np.int32(steps)], {
        2: exact(a @ b)
    }


@case("wgmma", "wgmma_shared", 2, 128, sizes=(3, 1, 0))
def wgmma_shared(rng, steps):
    k = steps * 16
    a, b = integers(rng, -4, 5, 128, k), integers(rng, -4, 5, 16, k)
    return [a.astype(np.float16), b.astype(np.float16),
            np.zeros((128, 16), np.float32), np.int32(steps)], {
        2: exact(a @ b.T)
    }


@case("wgmma", "wgmma_registers", 2, 128, sizes=(3, 1, 0))
def wgmma_registers(rng, steps):
    return wgmma_shared(rng, steps)


@case("throughput", "tiled_gemm", lambda m, n, k: (n // 64, m // 64), 128,
      sizes=((128, 64, 96), (64, 128, 32), (64, 64, 0)))
def tiled_gemm(rng, m, n, k):
    a, b = integers(rng, -4, 5, m, k), integers(rng, -4, 5, n, k)
    return [a.astype(np.float16), b.astype(np.float16),
            np.zeros((m, n), np.float32), np.int32(n), np.int32(k)], {
        2: exact(a @ b.T)
    }


@case("throughput", "row_sum_squares", 3, 96, sizes=(1001, 5, 0, 96))
def row_sum_squares(rng, cols):
    x = integers(rng, -8, 9, 3, cols).astype(np.float32)  # sums are exact
    return [x, np.zeros(3, np.float32), np.int32(cols)], {
        1: exact((x * x).sum(1))
    }


@case("row_sum", "mlir_row_sum", 5, 64)
def mlir_row_sum(rng):
    x = integers(rng, -8, 9, 5, 256).astype(np.float32)
    return [x, np.zeros(5, np.float32)], {1: exact((x * x).sum(1))}


@case("tile_gemm", "mlir_tile_gemm", 1, 128)
def mlir_tile_gemm(rng):
    a, b = integers(rng, -4, 5, 32, 64), integers(rng, -4, 5, 64, 32)
    return [a.astype(np.float16), b.astype(np.float16),
            np.zeros((32, 32), np.float32)], {2: exact(a @ b)}


# --- asynchronous copies -----------------------------------------------------


@case("pipeline", "three_stages", 2, 64, sizes=(5, 2, 1, 0))
def three_stages(rng, tiles):
    x = integers(rng, -8, 9, 2, tiles * 256).astype(np.float32)
    per_thread = x.reshape(2, tiles, 64, 4).sum((1, 3))
    ref = np.roll(per_thread, -33, 1)
    return [x, np.zeros((2, 64), np.float32), np.int32(tiles)], {
        1: exact(ref)
    }


@case("pipeline", "zero_fill", 3, 32)
def zero_fill(rng):
    cols = 92  # 23 chunks of 16 bytes; the rest is filled
    x = normals(rng, 3, cols)
    ref = np.pad(x, ((0, 0), (0, 128 - cols)))[:, ::-1]
    return [x, np.full((3, 128), -1, np.float32), np.int32(cols)], {
        1: exact(ref)
    }


@case("pipeline", "copy_mbarrier", 2, 128, sizes=(5, 1, 2, 0))
def copy_mbarrier(rng, tiles):
    x = integers(rng, -100, 100, 2, tiles, 128)
    ref = (x[:, :, ::-1] * np.arange(1, tiles + 1)[:, None]).sum(1)
    return [x, np.zeros((2, 128), np.int32), np.int32(tiles)], {
        1: exact(ref)
    }


@case("bulk", "bulk_reverse", 3, 128)
def bulk_reverse(rng):
    x = integers(rng, -100, 100, 3, 256)
    ref = x[:, ::-1] + 1
    return [x, np.zeros_like(x), np.zeros(3, np.int32)], {
        1: exact(ref),
        2: exact(ref[:, 0]),
    }


@case("bulk", "bulk_ring", 2, 96, sizes=(5, 2, 1, 0))
def bulk_ring(rng, tiles):
    x = integers(rng, -8, 9, 2, tiles, 128).astype(np.float32)
    ref = (x * x[:, :, ::-1]).sum(1)[:, :64]
    return [x, np.zeros((2, 64), np.float32), np.int32(tiles)], {
        1: exact(ref)
    }


@case("bulk", "bulk_add", 3, 64, sizes=(7, 2))
def bulk_add(rng, rows):
    x = integers(rng, -8, 9, rows, 64).astype(np.float32)
    return [x, np.zeros(64, np.float32), np.int32(rows)], {
        1: exact(2 * x.sum(0))
    }


def box(array, rows, cols, swizzle="none"):
    return sim.TensorMap(array, [cols, rows], swizzle=swizzle)


@case("tma", "tma_transpose", (2, 2), 64)
def tma_transpose(rng):
    x = integers(rng, -100, 100, 28, 60)  # boxes of 16 x 32 hang over
    out = np.zeros((60, 28), np.int32)
    return [box(x, 16, 32), box(out, 32, 16)], {1: exact(x.T + 1)}


@case("tma", "tma_swizzle", 2, 64, sizes=(5, 1, 2))
def tma_swizzle(rng, boxes):
    x = integers(rng, -100, 100, boxes, 8, 2, 32)  # box, row, block, column
    weighted = x * np.arange(1, boxes * 8 + 1).reshape(boxes, 8, 1, 1)
    by_parity = [weighted[:, r::2].sum((0, 1)) for r in (0, 1)]
    ref = np.stack(by_parity, 1)  # block, parity of the row, column
    return [box(x.reshape(-1, 64), 8, 32, "128B"),
            np.zeros((2, 2, 32), np.int32), np.int32(boxes)], {1: exact(ref)}


# --- roles, named barriers, clusters -----------------------------------------


@case("specialized", "named_barriers", 2, 64, sizes=(5, 2, 1, 0))
def named_barriers(rng, tiles):
    x = integers(rng, -100, 100, 2, tiles, 32)
    return [x, np.zeros((2, 32), np.int32), np.int32(tiles)], {
        1: exact(3 * x.sum(1)[:, ::-1])
    }


@case("specialized", "partial_barriers", 2, 128)
def partial_barriers(rng):
    x = integers(rng, -100, 100, 2, 2, 64)
    return [x, np.zeros_like(x)], {1: exact(2 * x[:, ::-1, ::-1])}


@case("specialized", "barrier_votes", 3, 96)
def barrier_votes(rng):
    x = integers(rng, -99, 90, 3, 96)
    x[1, 5], x[2, 7] = -100, 91
    ref = np.stack([(x > 0).sum(1), (x > -100).all(1), (x > 90).any(1)], 1)
    return [x, np.zeros((3, 3), np.int32)], {1: exact(ref)}


@case("cluster", "cluster_histogram", 4, 64, cluster=2, sizes=(601, 100, 0))
def cluster_histogram(rng, n):
    bins = integers(rng, 0, 32, n)
    return [bins, np.zeros(32, np.int32), np.int32(n)], {
        1: exact(np.bincount(bins, minlength=32))
    }


@case("cluster", "cluster_shift", 8, 32, cluster=4)
def cluster_shift(rng):
    x = integers(rng, -100, 100, 2, 4, 32)
    return [x, np.zeros_like(x)], {1: exact(np.roll(x, -1, 1)[:, :, ::-1])}


# --- NVIDIA's libraries ------------------------------------------------------


@case("library", "barrier_bulk_copy", 2, 96)
def barrier_bulk_copy(rng):
    x = integers(rng, -100, 100, 2, 128)
    return [x, np.zeros_like(x)], {1: exact(2 * x[:, ::-1])}


@case("library", "ticket_lock", 5, 1)
def ticket_lock(rng):
    tickets = np.zeros(1, np.uint32)
    # 1, 4, 13, 40, 121: what five turns make of zero
    return [tickets, tickets.copy(), np.zeros(2, np.int32)], {
        0: exact([5]),
        1: exact([5]),
        2: exact([5, 121]),
    }


@case("library", "group_copy_reduce", 2, 256)
def group_copy_reduce(rng):
    x = integers(rng, -100, 100, 2, 256)
    sums = x[:, ::-1].reshape(-1, 8).sum(1)
    return [x, np.zeros((64, 2), np.int32)], {
        1: exact(np.stack([sums, x.reshape(-1, 8).max(1)], 1))
    }
