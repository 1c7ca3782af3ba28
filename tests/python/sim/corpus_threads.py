"""Reductions, scans, sorts, counting, softmax, and the language itself."""

import numpy as np
from corpus_case import case, close, exact, integers, normals

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
