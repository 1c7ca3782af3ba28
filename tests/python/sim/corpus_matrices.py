"""Products on tensor cores, and what MLIR makes."""

import numpy as np
from corpus_case import case, exact, integers

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
