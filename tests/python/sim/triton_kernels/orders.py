"""Sorting, scans, histograms, atomics, locks."""

import torch
import triton
import triton.language as tl

from .family import Problem, family


@triton.jit
def _sort(out, x, columns, DESCENDING: tl.constexpr, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    z = tl.load(x + row * columns + at, mask=at < columns, other=float("inf"))
    tl.store(out + row * columns + at, tl.sort(z, descending=DESCENDING), mask=at < columns)


@family
def sort_rows(data):
    x = data.normal(3, 200)
    out = torch.empty_like(x)
    return (Problem().launch(_sort, (3,), out, x, 200, DESCENDING=False, B=256, num_warps=4)
            .equal(out, x.sort(1).values))


@triton.jit
def _largest(out, x, columns, K: tl.constexpr, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    z = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    tl.store(out + row * K + tl.arange(0, K), tl.topk(z, K))


@family
def largest_of_rows(data):
    x, out = data.normal(4, 100), torch.empty(4, 8)
    return (Problem().launch(_largest, (4,), out, x, 100, K=8, B=128, num_warps=4)
            .equal(out, x.topk(8).values))


@triton.jit
def _sort_pairs(values, places, x, B: tl.constexpr):
    """Keys of 64 bits: the value's, ordered as an integer, and behind it the index."""
    at = tl.arange(0, B)
    bits = tl.load(x + at).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    key = tl.sort((ordered.to(tl.uint64) << 32) | at.to(tl.uint64))
    place = (key & 0xFFFFFFFF).to(tl.int32)
    tl.store(places + at, place)
    tl.store(values + at, tl.load(x + place))


@family
def sort_pairs(data):
    x = data.normal(128).round(decimals=1) + 0.0
    values, places = torch.empty(128), torch.empty(128, dtype=torch.int32)
    x += 0.0  # No negative zero, which torch takes for equal.
    want = x.sort(stable=True)
    return (Problem().launch(_sort_pairs, (1,), values, places, x, B=128, num_warps=4)
            .equal(values, want.values).equal(places, want.indices))


@triton.jit
def _sums_so_far(out, x, columns, REVERSE: tl.constexpr, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    z = tl.load(x + row * columns + at, mask=at < columns, other=0)
    tl.store(out + row * columns + at, tl.cumsum(z, 0, reverse=REVERSE), mask=at < columns)


@family
def cumulative_sum(data):
    x = data.integers(-100, 100, 3, 200)
    out = torch.empty_like(x)
    return (Problem().launch(_sums_so_far, (3,), out, x, 200, REVERSE=False, B=256, num_warps=4)
            .equal(out, x.cumsum(1)))


@family
def cumulative_sum_reverse(data):
    x = data.integers(-100, 100, 2, 256, dtype=torch.int64)
    out = torch.empty_like(x)
    return (Problem().launch(_sums_so_far, (2,), out, x, 256, REVERSE=True, B=256, num_warps=2)
            .equal(out, x.flip(1).cumsum(1).flip(1)))


@triton.jit
def _step(a, b, a_, b_):
    return a * a_, b * a_ + b_


@triton.jit
def _recurrence(out, gates, x, D: tl.constexpr, B: tl.constexpr):
    at = tl.arange(0, B)[:, None] * D + tl.arange(0, D)[None, :]
    _, h = tl.associative_scan((tl.load(gates + at), tl.load(x + at)), 0, _step)
    tl.store(out + at, h)


@family
def linear_recurrence(data):
    gates, x = data.normal(64, 8).sigmoid(), data.normal(64, 8)
    out, state, want = torch.empty_like(x), torch.zeros(8).double(), []
    for g, z in zip(gates.double(), x.double()):
        want.append(state := state * g + z)
    return (Problem().launch(_recurrence, (1,), out, gates, x, D=8, B=64, num_warps=4)
            .close(out, torch.stack(want)))


@triton.jit
def _product_so_far(out, x, B: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, B)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + at, tl.cumprod(tl.load(x + at), 1))


@family
def cumulative_product(data):
    x = data.normal(16, 32) * 0.1 + 1
    out = torch.empty_like(x)
    return (Problem().launch(_product_so_far, (1,), out, x, B=16, C=32, num_warps=2)
            .close(out, x.double().cumprod(1)))


@triton.jit
def _chained_sums(out, totals, flags, x, n, B: tl.constexpr):
    """Each program waits for the sum of those before it."""
    block = tl.program_id(0)
    at = block * B + tl.arange(0, B)
    z = tl.load(x + at, mask=at < n, other=0)
    before = 0
    if block > 0:
        while tl.atomic_add(flags + block - 1, 0, sem="acquire") == 0:
            pass
        before = tl.load(totals + block - 1)
    tl.store(totals + block, before + tl.sum(z, 0))
    tl.debug_barrier()
    tl.atomic_xchg(flags + block, 1, sem="release")
    tl.store(out + at, before + tl.cumsum(z, 0), mask=at < n)


@family
def chained_scan(data):
    x = data.integers(-100, 100, 400)
    out, totals, flags = torch.empty_like(x), *torch.zeros(2, 4, dtype=torch.int32)
    return (Problem().launch(_chained_sums, (4,), out, totals, flags, x, 400, B=128, num_warps=4)
            .equal(out, x.cumsum(0)))


@triton.jit
def _histogram(out, x, n, B: tl.constexpr, BINS: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    z = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(out + tl.arange(0, BINS), tl.histogram(z, BINS, mask=at < n))


@family
def histogram(data):
    x, out = data.integers(0, 64, 450), torch.zeros(64, dtype=torch.int32)
    return (Problem().launch(_histogram, (2,), out, x, 450, B=256, BINS=64, num_warps=4)
            .equal(out, x.bincount(minlength=64)))


@triton.jit
def _count(out, x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(out + tl.load(x + at, mask=at < n, other=0), 1, mask=at < n, sem="relaxed")


@family
def bin_counts(data):
    x, out = data.integers(0, 10, 300), torch.zeros(10, dtype=torch.int32)
    return (Problem().launch(_count, (3,), out, x, 300, B=128, num_warps=4)
            .equal(out, x.bincount(minlength=10)))


@triton.jit
def _extremes(out, x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    z = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_max(out + tl.zeros_like(at), z, mask=at < n)
    tl.atomic_min(out + 1, tl.min(tl.where(at < n, z, 2147483647), 0))
    tl.atomic_or(out + 2, tl.reduce_or(tl.where(at < n, z, 0), 0))
    tl.atomic_xor(out + 3, tl.xor_sum(tl.where(at < n, z, 0), 0))


@family
def atomic_extremes(data):
    x, out = data.integers(1, 1000, 300), torch.tensor([0, 5000, 0, 0], dtype=torch.int32)
    bits = [0, 0]
    for v in x.tolist():
        bits = [bits[0] | v, bits[1] ^ v]
    want = torch.tensor([int(x.max()), int(x.min()), *bits])
    return (Problem().launch(_extremes, (3,), out, x, 300, B=128, num_warps=4).equal(out, want))


@triton.jit
def _locked_update(state, lock, x, B: tl.constexpr):
    """The best value and who had it, two words behind one lock."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    best, index = tl.max(tl.load(x + at), 0, return_indices=True)
    while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
        pass
    before = tl.load(state)
    tl.debug_barrier()  # Every warp has read it before one stores.
    if best > before:
        tl.store(state, best)
        tl.store(state + 1, tl.program_id(0) * B + index)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


@family
def spin_lock(data):
    x = data.permutation(256).to(torch.int32)
    state, lock = torch.tensor([-1, -1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    want = torch.stack([x.max(), x.argmax().to(torch.int32)])
    return (Problem().launch(_locked_update, (4,), state, lock, x, B=64, num_warps=2)
            .equal(state, want).equal(lock, torch.zeros(1)))


@triton.jit
def _sum_by_the_last(out, parts, counter, x, n, PROGRAMS: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(parts + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0.0), 0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1) == PROGRAMS - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, PROGRAMS)), 0))


@family
def sum_by_the_last(data):
    x, out, parts = data.normal(450), torch.empty(1), torch.empty(4)
    counter = torch.zeros(1, dtype=torch.int32)
    return (Problem().launch(_sum_by_the_last, (4,), out, parts, counter, x, 450, PROGRAMS=4, B=128,
                             num_warps=4).close(out, x.double().sum().reshape(1)))


@triton.jit
def _compact(out, count, x, n, B: tl.constexpr):
    at = tl.arange(0, B)
    z = tl.load(x + at, mask=at < n, other=0)
    kept = (z > 0) & (at < n)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(out + place, z, mask=kept)
    tl.store(count, tl.sum(kept.to(tl.int32), 0))


@family
def compaction(data):
    x = data.integers(-50, 50, 200)
    out, count = torch.zeros(200, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    kept = x[x > 0]
    want = torch.cat([kept, torch.zeros(200 - len(kept), dtype=torch.int32)])
    return (Problem().launch(_compact, (1,), out, count, x, 200, B=256, num_warps=4)
            .equal(out, want).equal(count, torch.tensor([len(kept)])))


@triton.jit
def _barrier_of_programs(out, state, x, PROGRAMS: tl.constexpr, B: tl.constexpr):
    """Every program writes, all wait for all, every program reads its neighbour's."""
    program, at = tl.program_id(0), tl.arange(0, B)
    tl.store(x + program * B + at, program * 1000 + at)
    tl.debug_barrier()
    tl.atomic_add(state, 1, sem="release")
    while tl.atomic_add(state, 0, sem="acquire") < PROGRAMS:
        pass
    tl.debug_barrier()
    neighbour = (program + 1) % PROGRAMS
    tl.store(out + program * B + at, tl.load(x + neighbour * B + at))


@family
def grid_barrier(data):
    out, x = torch.empty(2, 3, 64, dtype=torch.int32)
    want = torch.tensor([[1], [2], [0]]) * 1000 + torch.arange(64)
    return (Problem().launch(_barrier_of_programs, (3,), out, torch.zeros(1, dtype=torch.int32), x,
                             PROGRAMS=3, B=64, num_warps=2).equal(out, want))


@triton.jit
def _radix_pass(out, x, SHIFT: tl.constexpr, N: tl.constexpr):
    """A stable sort by four bits: how many have smaller digits, and equal ones before."""
    value = tl.load(x + tl.arange(0, N))
    digit = (value >> SHIFT) & 15
    mine = (digit[:, None] == tl.arange(0, 16)[None, :]).to(tl.int32)
    before = tl.sum(mine * (tl.cumsum(mine, 0) - 1), 1)
    counts = tl.histogram(digit, 16)
    tl.store(out + tl.gather(tl.cumsum(counts, 0) - counts, digit, 0) + before, value)


@family
def radix_pass(data):
    x = data.integers(0, 256, 256)
    out = torch.empty_like(x)
    return (Problem().launch(_radix_pass, (1,), out, x, SHIFT=4, N=256, num_warps=4)
            .equal(out, x[(x >> 4).argsort(stable=True)]))


@triton.jit
def _selective_scan(y, x, steps, rates, inputs, outputs, L, D, N: tl.constexpr, T: tl.constexpr):
    """One channel's state of N numbers, T moments at a time."""
    channel, moment, n = tl.program_id(0), tl.arange(0, T), tl.arange(0, N)
    state = tl.zeros((1, N), tl.float32)
    rate = tl.load(rates + channel * N + n)
    for start in range(0, L, T):
        at = (start + moment) * D + channel
        wide = (start + moment)[:, None] * N + n[None, :]
        step = tl.load(steps + at)
        keep = tl.exp(step[:, None] * rate[None, :])
        add = (step * tl.load(x + at))[:, None] * tl.load(inputs + wide)
        kept, added = tl.associative_scan((keep, add), 0, _step)
        states = kept * state + added
        tl.store(y + at, tl.sum(states * tl.load(outputs + wide), 1))
        state = tl.sum(tl.where((moment == T - 1)[:, None], states, 0.0), 0)[None, :]


@family
def selective_scan(data):
    length, d, n = 64, 3, 16
    x, steps = data.normal(length, d), data.normal(length, d).sigmoid()
    rates, inputs, outputs = -data.normal(d, n).exp(), data.normal(length, n), data.normal(length, n)
    y, state, want = torch.empty(length, d), torch.zeros(d, n).double(), []
    for z, s, b, c in zip(x.double(), steps.double(), inputs.double(), outputs.double()):
        state = state * torch.exp(s[:, None] * rates) + (s * z)[:, None] * b
        want.append(state @ c)
    return (Problem().launch(_selective_scan, (d,), y, x, steps, rates, inputs, outputs, length, d,
                             N=n, T=32, num_warps=4)
            .close(y, torch.stack(want), 1e-4, 1e-4))
