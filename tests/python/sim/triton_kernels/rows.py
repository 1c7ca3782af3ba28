"""Normalisations, softmax and losses: a row, or a few, a program."""

import torch
import triton
import triton.language as tl

from .family import Problem, family, half_precision


@triton.jit
def _softmax(y, x, columns, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    z = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    e = tl.exp(z - tl.max(z, 0))
    tl.store(y + row * columns + at, e / tl.sum(e, 0), mask=at < columns)


@family
def softmax(data):
    x = data.normal(6, 200)
    y = torch.empty_like(x)
    return (Problem().launch(_softmax, (6,), y, x, 200, B=256, num_warps=4)
            .close(y, x.double().softmax(1)))


@triton.jit
def _online_softmax(y, x, columns, B: tl.constexpr):
    row = tl.program_id(0)
    high = tl.full((B,), -float("inf"), tl.float32)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, columns, B):
        at = start + tl.arange(0, B)
        z = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
        new = tl.maximum(high, z)
        total = tl.where(new == -float("inf"), 0.0, total * tl.exp(high - new) + tl.exp(z - new))
        high = new
    best = tl.max(high, 0)
    total = tl.sum(tl.where(high == -float("inf"), 0.0, total * tl.exp(high - best)), 0)
    for start in range(0, columns, B):
        at = start + tl.arange(0, B)
        z = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
        tl.store(y + row * columns + at, tl.exp(z - best) / total, mask=at < columns)


@family
def online_softmax(data):
    x = data.normal(4, 700)
    y = torch.empty_like(x)
    return (Problem().launch(_online_softmax, (4,), y, x, 700, B=256, num_warps=2)
            .close(y, x.double().softmax(1)))


@triton.jit
def _softmax_of_rows(y, x, rows, columns, R: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    at = tl.arange(0, B)[None, :]
    inside = (row < rows) & (at < columns)
    z = tl.load(x + row * columns + at, mask=inside, other=-float("inf")).to(tl.float32)
    z = tl.where(row < rows, z, 0.0)
    z = z - tl.max(z, 1)[:, None]
    tl.store(y + row * columns + at, z - tl.log(tl.sum(tl.exp(z), 1))[:, None], mask=inside)


@family
def log_softmax(data):
    x = data.normal(13, 60, dtype=torch.float16)
    y = torch.empty_like(x)
    return (Problem().launch(_softmax_of_rows, (4,), y, x, 13, 60, R=4, B=64, num_warps=4)
            .close(y, x.double().log_softmax(1), *half_precision(x)))


@triton.jit
def _layer_norm(y, x, weight, bias, means, factors, columns, eps, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    inside = at < columns
    z = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(z, 0) / columns
    apart = tl.where(inside, z - mean, 0.0)
    factor = tl.rsqrt(tl.sum(apart * apart, 0) / columns + eps)
    tl.store(means + row, mean)
    tl.store(factors + row, factor)
    w = tl.load(weight + at, mask=inside)
    b = tl.load(bias + at, mask=inside)
    tl.store(y + row * columns + at, apart * factor * w + b, mask=inside)


def _norm_problem(data, rows, columns):
    x, w, b = data.normal(rows, columns), data.normal(columns), data.normal(columns)
    y, means, factors = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    problem = Problem().launch(_layer_norm, (rows,), y, x, w, b, means, factors, columns, 1e-5,
                               B=256, num_warps=4)
    return problem, x, w, b, y, means, factors


@family
def layer_norm(data):
    problem, x, w, b, y, means, factors = _norm_problem(data, 5, 250)
    d = x.double()
    want = torch.nn.functional.layer_norm(d, (250,), w.double(), b.double(), 1e-5)
    return problem.close(y, want).close(means, d.mean(1)).close(
        factors, (d.var(1, correction=0) + 1e-5).rsqrt())


@triton.jit
def _layer_norm_backward(dx, dw, db, dy, x, weight, means, factors, locks, columns, G, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    inside = at < columns
    z = tl.load(x + row * columns + at, mask=inside, other=0.0)
    g = tl.load(dy + row * columns + at, mask=inside, other=0.0)
    w = tl.load(weight + at, mask=inside, other=0.0)
    factor = tl.load(factors + row)
    unit = tl.where(inside, (z - tl.load(means + row)) * factor, 0.0)
    wg = w * g
    c1 = tl.sum(unit * wg, 0) / columns
    c2 = tl.sum(wg, 0) / columns
    tl.store(dx + row * columns + at, (wg - (unit * c1 + c2)) * factor, mask=inside)
    # Rows share G partial sums, each behind a lock; its counter says whether anybody was there.
    group = row % G
    lock = locks + group
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    part = group * columns + at
    if tl.load(locks + G + group) == 0:
        tl.atomic_xchg(locks + G + group, 1)
        sum_w = unit * g
        sum_b = g
    else:
        sum_w = unit * g + tl.load(dw + part, mask=inside)
        sum_b = g + tl.load(db + part, mask=inside)
    tl.store(dw + part, sum_w, mask=inside)
    tl.store(db + part, sum_b, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def _column_sums(out, x, rows, columns, R: tl.constexpr, C: tl.constexpr):
    column = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, rows, R):
        row = start + tl.arange(0, R)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0), mask=column < columns)


@family
def layer_norm_backward(data):
    problem, x, w, b, _, means, factors = _norm_problem(data, 6, 200)
    dy, dx = data.normal(6, 200), torch.empty(6, 200)
    parts, dwb = torch.zeros(2, 2, 200), torch.empty(2, 200)
    locks = torch.zeros(4, dtype=torch.int32)
    problem.launch(_layer_norm_backward, (6,), dx, parts[0], parts[1], dy, x, w, means, factors,
                   locks, 200, 2, B=256, num_warps=4)
    for i in range(2):
        problem.launch(_column_sums, (4,), dwb[i], parts[i], 2, 200, R=2, C=64, num_warps=2)
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    torch.nn.functional.layer_norm(leaves[0], (200,), *leaves[1:], 1e-5).backward(dy.double())
    return problem.close(dx, leaves[0].grad).close(dwb, torch.stack([t.grad for t in leaves[1:]]))


@family
def column_sums(data):
    x, out = data.normal(37, 100), torch.empty(100)
    return (Problem().launch(_column_sums, (2,), out, x, 37, 100, R=16, C=64, num_warps=4)
            .close(out, x.double().sum(0)))


@triton.jit
def _rms_norm(y, residual, x, weight, columns, eps, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    inside = at < columns
    z = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(residual + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual + row * columns + at, z.to(residual.dtype.element_ty), mask=inside)
    factor = tl.rsqrt(tl.sum(z * z, 0) / columns + eps)
    w = tl.load(weight + at, mask=inside)
    tl.store(y + row * columns + at, (z * factor * w).to(y.dtype.element_ty), mask=inside)


@family
def rms_norm(data):
    x, r = (data.normal(4, 500, dtype=torch.bfloat16) for _ in range(2))
    w, y = data.normal(500), torch.empty_like(x)
    z = x.double() + r.double()
    want = z * (z.square().mean(1, keepdim=True) + 1e-6).rsqrt() * w.double()
    return (Problem().launch(_rms_norm, (4,), y, r, x, w, 500, 1e-6, B=512, num_warps=8)
            .close(y, want, *half_precision(x)).close(r, z, *half_precision(x)))


@triton.jit
def _group_norm(y, x, size, eps, B: tl.constexpr):
    group = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    squares = tl.zeros((B,), tl.float32)
    for start in range(0, size, B):
        at = start + tl.arange(0, B)
        z = tl.load(x + group * size + at, mask=at < size, other=0.0)
        total += z
        squares += z * z
    mean = tl.sum(total, 0) / size
    factor = tl.rsqrt(tl.sum(squares, 0) / size - mean * mean + eps)
    for start in range(0, size, B):
        at = start + tl.arange(0, B)
        z = tl.load(x + group * size + at, mask=at < size)
        tl.store(y + group * size + at, (z - mean) * factor, mask=at < size)


@family
def group_norm(data):
    x = data.normal(2, 6, 10, 10)
    y = torch.empty_like(x)
    return (Problem().launch(_group_norm, (6,), y, x, 200, 1e-5, B=128, num_warps=2)
            .close(y, torch.nn.functional.group_norm(x.double(), 3), atol=2e-5))


@triton.jit
def _join_moments(n, mean, m2, n_, mean_, m2_):
    count = n + n_
    share = tl.where(count == 0, 0.0, n_ / count)
    apart = mean_ - mean
    return count, mean + apart * share, m2 + m2_ + apart * apart * n * share


@triton.jit
def _moments(out, x, columns, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    inside = at < columns
    z = tl.load(x + row * columns + at, mask=inside, other=0.0)
    n, mean, m2 = tl.reduce((tl.where(inside, 1.0, 0.0), z, tl.zeros_like(z)), 0, _join_moments)
    tl.store(out + 2 * row, mean)
    tl.store(out + 2 * row + 1, m2 / n)


@family
def welford_moments(data):
    x, out = data.normal(5, 300) + 10, torch.empty(5, 2)
    want = torch.stack([x.double().mean(1), x.double().var(1, correction=0)], 1)
    return Problem().launch(_moments, (5,), out, x, 300, B=512, num_warps=4).close(out, want)


@triton.jit
def _cross_entropy(loss, logits, labels, classes, B: tl.constexpr):
    """The loss of each row; its gradient takes the place of the logits."""
    row = tl.program_id(0)
    label = tl.load(labels + row)
    here = logits + row * classes
    high = -float("inf")
    total = 0.0
    for start in range(0, classes, B):
        at = start + tl.arange(0, B)
        z = tl.load(here + at, mask=at < classes, other=-float("inf"))
        new = tl.maximum(high, tl.max(z, 0))
        total = total * tl.exp(high - new) + tl.sum(tl.exp(z - new), 0)
        high = new
    tl.store(loss + row, high + tl.log(total) - tl.load(here + label))
    tl.debug_barrier()
    for start in range(0, classes, B):
        at = start + tl.arange(0, B)
        z = tl.load(here + at, mask=at < classes)
        p = tl.exp(z - high) / total
        tl.store(here + at, p - tl.where(at == label, 1.0, 0.0), mask=at < classes)


@family
def cross_entropy(data):
    z, labels = data.normal(5, 600), data.integers(0, 600, 5, dtype=torch.int64)
    leaf = z.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf, labels, reduction="none")
    want.sum().backward()
    loss = torch.empty(5)
    return (Problem().launch(_cross_entropy, (5,), loss, z, labels, 600, B=256, num_warps=4)
            .close(loss, want.detach()).close(z, leaf.grad))


@triton.jit
def _argmax(out, x, columns, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    z = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    value, index = tl.max(z, 0, return_indices=True)
    tl.store(out + 2 * row, index)
    tl.store(out + 2 * row + 1, tl.argmin(tl.where(at < columns, z, float("inf")), 0))


@family
def argmax(data):
    x = data.normal(7, 300).round(decimals=1)  # Ties go to the lower index.
    out = torch.empty(7, 2, dtype=torch.int32)
    want = torch.stack([torch.tensor(x.numpy().argmax(1)), torch.tensor(x.numpy().argmin(1))], 1)
    return Problem().launch(_argmax, (7,), out, x, 300, B=512, num_warps=4).equal(out, want)


@triton.jit
def _divergence(out, p, q, columns, B: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, columns, B):
        at = start + tl.arange(0, B)
        a = tl.load(p + row * columns + at, mask=at < columns, other=0.0)
        b = tl.load(q + row * columns + at, mask=at < columns, other=0.0)
        total += tl.exp(a) * (a - b)
    tl.atomic_add(out, tl.sum(total, 0))


@family
def kl_divergence(data):
    p, q = (data.normal(4, 300).log_softmax(1) for _ in range(2))
    out = torch.zeros(1)
    want = (p.double().exp() * (p.double() - q.double())).sum()
    return (Problem().launch(_divergence, (4,), out, p, q, 300, B=128, num_warps=4)
            .close(out, want.reshape(1)))


@triton.jit
def _log_sum_exp(out, x, rows, columns, R: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    high = tl.full((R,), -float("inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    for start in range(0, columns, B):
        at = start + tl.arange(0, B)
        inside = (row[:, None] < rows) & (at[None, :] < columns)
        z = tl.load(x + row[:, None] * columns + at[None, :], mask=inside, other=-1e30)
        new = tl.maximum(high, tl.max(z, 1))
        total = total * tl.exp(high - new) + tl.sum(tl.exp(z - new[:, None]), 1)
        high = new
    tl.store(out + row, high + tl.log(total), mask=row < rows)


@family
def log_sum_exp(data):
    x, out = data.normal(21, 200), torch.empty(21)
    return (Problem().launch(_log_sum_exp, (2,), out, x, 21, 200, R=16, B=64, num_warps=4)
            .close(out, x.double().logsumexp(1)))
