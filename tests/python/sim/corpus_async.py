"""Asynchronous copies, warps with roles, clusters, NVIDIA's libraries."""

import numpy as np
from corpus_case import case, exact, integers, normals

from moe_mlir import sim

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


@case("warpgroups", "built_map", 3, 128)
def built_map(rng):
    x = integers(rng, -100, 100, 3, 21, 44)
    box = np.pad(x, ((0, 0), (0, 0), (0, 4)))[:, 1:16:2, 16:48]
    return [x, np.zeros((3, 256), np.int32), np.zeros((3, 128), np.uint8),
            np.int32(21), np.int32(44)], {
        1: exact(box.reshape(3, 256)[:, ::-1])
    }


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


@case("warpgroups", "shared_registers", 2, 256, sizes=(5, 2, 1, 0))
def shared_registers(rng, tiles):
    x = integers(rng, -100, 100, 2, tiles, 128)
    weights = np.arange(1, tiles + 1)[:, None]
    last = x[:, -1, ::-1] if tiles else np.zeros((2, 128), np.int32)
    return [x, np.zeros((2, 128), np.int32), np.ones((2, 128), np.int32),
            np.int32(tiles)], {
        1: exact((weights * x[:, :, ::-1]).sum(1)),
        2: exact(last),
    }


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
