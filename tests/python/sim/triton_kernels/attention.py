"""Attention: forward, backward, decoding, paged, linear."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .family import Problem, family


@triton.jit
def _forward(out, lse, q, k, v, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             CAUSAL: tl.constexpr):
    head = tl.program_id(1) * N * D
    rows, dims = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    queries = tl.load(q + head + rows[:, None] * D + dims[None, :], mask=rows[:, None] < N, other=0.0)
    high = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    last = (tl.program_id(0) + 1) * BM if CAUSAL else N
    for start in range(0, last, BN):
        columns = start + tl.arange(0, BN)
        keys = tl.load(k + head + columns[None, :] * D + dims[:, None],
                       mask=columns[None, :] < N, other=0.0)
        s = tl.dot(queries, keys) * scale
        seen = columns[None, :] < N
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None])
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(high, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        shrink = tl.exp(high - new)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v + head + columns[:, None] * D + dims[None, :],
                         mask=columns[:, None] < N, other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        high = new
    tl.store(out + head + rows[:, None] * D + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
             mask=rows[:, None] < N)
    tl.store(lse + tl.program_id(1) * N + rows, high + tl.log(total), mask=rows < N)


def _attend(q, k, v, causal):
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def _forward_problem(data, heads, n, d, causal, dtype=torch.float16, warps=4, block=(64, 32)):
    q, k, v = (data.normal(heads, n, d, dtype=dtype) for _ in range(3))
    out, lse = torch.empty_like(q), torch.empty(heads, n)
    problem = Problem().launch(
        _forward, (triton.cdiv(n, block[0]), heads), out, lse, q, k, v, n, d ** -0.5, D=d,
        BM=block[0], BN=block[1], CAUSAL=causal, num_warps=warps, num_stages=2)
    return problem, q, k, v, out, lse


def _check_forward(problem, q, k, v, out, lse, causal):
    want, sums = _attend(q.double(), k.double(), v.double(), causal)
    # The weights are rounded to the values' type before the product.
    eps = torch.finfo(q.dtype).eps
    return problem.close(out, want, 4 * eps, 4 * eps).close(lse, sums, 1e-4, 1e-4)


@family
def attention_causal(data):
    return _check_forward(*_forward_problem(data, 2, 96, 64, True), True)


@family
def attention_full(data):
    """A remainder of the keys, bfloat16, eight warps."""
    return _check_forward(*_forward_problem(data, 1, 120, 32, False, torch.bfloat16, 8, (128, 64)),
                          False)


@triton.jit
def _backward_keys(dk, dv, q, k, v, dout, lse, delta, N, scale, D: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr):
    columns, dims = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D)
    place = columns[:, None] * D + dims[None, :]
    keys, values = tl.load(k + place), tl.load(v + place)
    grad_k = tl.zeros((BN, D), tl.float32)
    grad_v = tl.zeros((BN, D), tl.float32)
    for start in range(tl.program_id(0) * BN // BM * BM, N, BM):
        rows = start + tl.arange(0, BM)
        queries = tl.load(q + rows[:, None] * D + dims[None, :])
        grads = tl.load(dout + rows[:, None] * D + dims[None, :])
        s = tl.dot(keys, tl.trans(queries)) * scale
        p = tl.exp(s - tl.load(lse + rows)[None, :])
        p = tl.where(columns[:, None] <= rows[None, :], p, 0.0)
        grad_v = tl.dot(p.to(grads.dtype), grads, grad_v)
        ds = p * (tl.dot(values, tl.trans(grads)) - tl.load(delta + rows)[None, :])
        grad_k = tl.dot(ds.to(queries.dtype), queries, grad_k)
    tl.store(dk + place, grad_k * scale)
    tl.store(dv + place, grad_v)


@triton.jit
def _backward_queries(dq, delta, out, q, k, v, dout, lse, scale, D: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr):
    rows, dims = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    place = rows[:, None] * D + dims[None, :]
    queries, grads = tl.load(q + place), tl.load(dout + place)
    drop = tl.sum(tl.load(out + place).to(tl.float32) * grads.to(tl.float32), 1)
    tl.store(delta + rows, drop)
    sums = tl.load(lse + rows)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BM, BN):
        columns = start + tl.arange(0, BN)
        keys = tl.load(k + columns[:, None] * D + dims[None, :])
        values = tl.load(v + columns[:, None] * D + dims[None, :])
        p = tl.exp(tl.dot(queries, tl.trans(keys)) * scale - sums[:, None])
        p = tl.where(columns[None, :] <= rows[:, None], p, 0.0)
        ds = p * (tl.dot(grads, tl.trans(values)) - drop[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc)
    tl.store(dq + place, acc * scale)


@family
def attention_backward(data):
    n, d = 64, 32
    problem, q, k, v, out, lse = _forward_problem(data, 1, n, d, True, block=(32, 32))
    dout = data.normal(n, d, dtype=torch.float16)
    dq, dk, dv, delta = (torch.empty(n, d), torch.empty(n, d), torch.empty(n, d), torch.empty(n))
    options = dict(D=d, BM=32, BN=32, num_warps=4, num_stages=2)
    problem.launch(_backward_queries, (2,), dq, delta, out, q, k, v, dout, lse, d ** -0.5, **options)
    problem.launch(_backward_keys, (2,), dk, dv, q, k, v, dout, lse, delta, n, d ** -0.5, **options)
    leaves = [t[0].double().requires_grad_() for t in (q, k, v)]
    _attend(*leaves, True)[0].backward(dout.double())
    for grad, leaf in zip((dq, dk, dv), leaves):
        problem.close(grad, leaf.grad, 1e-2, 1e-2)  # P and dS are rounded to half precision.
    return problem


@triton.jit
def _decode_part(parts, lses, q, cache_k, cache_v, table, lengths, scale, PAGES, D: tl.constexpr,
                 PAGE: tl.constexpr, SPLITS: tl.constexpr):
    """One query against the pages of one split of its keys."""
    row, split = tl.program_id(0), tl.program_id(1)
    dims, slot = tl.arange(0, D), tl.arange(0, PAGE)
    query = tl.load(q + row * D + dims)
    length = tl.load(lengths + row)
    high = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), tl.float32)
    for page in range(split, tl.cdiv(length, PAGE), SPLITS):
        block = tl.load(table + row * PAGES + page)
        at = block * PAGE * D + slot[:, None] * D + dims[None, :]
        here = page * PAGE + slot < length
        s = tl.sum(tl.load(cache_k + at) * query[None, :], 1) * scale
        s = tl.where(here, s, -float("inf"))
        new = tl.maximum(high, tl.max(s, 0))
        p = tl.exp(s - new)
        acc = acc * tl.exp(high - new) + tl.sum(p[:, None] * tl.load(cache_v + at), 0)
        total = total * tl.exp(high - new) + tl.sum(p, 0)
        high = new
    any = total > 0
    tl.store(parts + (row * SPLITS + split) * D + dims, acc / tl.where(any, total, 1.0))
    tl.store(lses + row * SPLITS + split, tl.where(any, high + tl.log(total), -float("inf")))


@triton.jit
def _decode_join(out, parts, lses, D: tl.constexpr, SPLITS: tl.constexpr):
    row, dims, split = tl.program_id(0), tl.arange(0, D), tl.arange(0, SPLITS)
    lse = tl.load(lses + row * SPLITS + split)
    weight = tl.exp(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    part = tl.load(parts + (row * SPLITS + split)[:, None] * D + dims[None, :])
    tl.store(out + row * D + dims, tl.sum(part * weight[:, None], 0))


@family
def attention_paged_decode(data):
    """Without fused multiply-adds: with them lanes that hold copies of a sum hold different ones,
    and Triton stores them all to one place, a race of lanes that the simulator finds
    (test_triton_findings.py).
    """
    rows, d, page, pages, splits = 3, 32, 16, 4, 2
    q, k, v = data.normal(rows, d), data.normal(12, page, d), data.normal(12, page, d)
    table = data.permutation(12).reshape(rows, pages).to(torch.int32)
    lengths = torch.tensor([5, 33, 64], dtype=torch.int32)
    parts, lses = torch.empty(rows, splits, d), torch.empty(rows, splits)
    out, want = torch.empty(rows, d), []
    for i, n in enumerate(lengths):
        keys, values = (t[table[i]].reshape(-1, d)[:n].double() for t in (k, v))
        want.append(_attend(q[i:i + 1].double(), keys, values, False)[0])
    return (Problem()
            .launch(_decode_part, (rows, splits), parts, lses, q, k, v, table, lengths, d ** -0.5,
                    pages, D=d, PAGE=page, SPLITS=splits, num_warps=4, enable_fp_fusion=False)
            .launch(_decode_join, (rows,), out, parts, lses, D=d, SPLITS=splits, num_warps=1)
            .close(out, torch.cat(want)))


@triton.jit
def _linear(out, q, k, v, N, D: tl.constexpr, B: tl.constexpr):
    """Causal linear attention: a state for the chunks before, a triangle in the chunk."""
    dims, step = tl.arange(0, D), tl.arange(0, B)
    state = tl.zeros((D, D), tl.float32)
    for start in range(0, N, B):
        at = (start + step)[:, None] * D + dims[None, :]
        queries, keys, values = tl.load(q + at), tl.load(k + at), tl.load(v + at)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        s = tl.where(step[:, None] >= step[None, :], s, 0.0)
        o = tl.dot(s, values, input_precision="ieee")
        o = tl.dot(queries, state, o, input_precision="ieee")
        tl.store(out + at, o)
        state = tl.dot(tl.trans(keys), values, state, input_precision="ieee")


@family
def attention_linear(data):
    q, k, v = (data.normal(64, 16) for _ in range(3))
    out = torch.empty_like(q)
    want = (q.double() @ k.double().mT).tril() @ v.double()
    return Problem().launch(_linear, (1,), out, q, k, v, 64, D=16, B=16, num_warps=4).close(
        out, want, 1e-4, 1e-4)


@triton.jit
def _decode_group(parts, lses, q, cache_k, cache_v, table, lengths, scale, PAGES, G: tl.constexpr,
                  D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
                  SPLITS: tl.constexpr):
    """The G query heads of one pair of key heads and a split of its keys, as rows of a product."""
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    head, dims = tl.arange(0, BH), tl.arange(0, D)
    place, real = (row * groups + group) * G + head, head < G
    queries = tl.load(q + place[:, None] * D + dims[None, :], mask=real[:, None], other=0.0)
    length = tl.load(lengths + row)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    end = tl.minimum(share * (split + 1), length)
    high = tl.full((BH,), -float("inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, D), tl.float32)
    for start in range(share * split, end, BN):
        key = start + tl.arange(0, BN)
        page = tl.load(table + row * PAGES + key // PAGE, mask=key < end, other=0)
        slot = ((page * PAGE + key % PAGE) * groups + group) * D
        keys = tl.load(cache_k + slot[None, :] + dims[:, None], mask=key[None, :] < end, other=0.0)
        s = tl.where(key[None, :] < end, tl.dot(queries, keys) * scale, -float("inf"))
        new = tl.maximum(high, tl.max(s, 1))
        p, shrink = tl.exp(s - new[:, None]), tl.exp(high - new)
        values = tl.load(cache_v + slot[:, None] + dims[None, :], mask=key[:, None] < end, other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        high = new
    any = total > 0
    acc = acc / tl.where(any, total, 1.0)[:, None]
    tl.store(parts + (place[:, None] * SPLITS + split) * D + dims[None, :], acc, mask=real[:, None])
    tl.store(lses + place * SPLITS + split, tl.where(any, high + tl.log(total), -float("inf")),
             mask=real)


@family
def attention_grouped_decode(data):
    """Four query heads share the keys of one; the last of two splits may be empty."""
    rows, groups, g, d, page, pages, splits = 3, 2, 4, 32, 16, 4, 2
    heads, half = groups * g, torch.float16
    q = data.normal(rows, heads, d, dtype=half)
    k, v = (data.normal(12, page, groups, d, dtype=half) for _ in range(2))
    table = data.permutation(12).reshape(rows, pages).to(torch.int32)
    lengths = torch.tensor([5, 33, 64], dtype=torch.int32)
    parts, lses = torch.empty(rows, heads, splits, d), torch.empty(rows, heads, splits)
    out, want = torch.empty(rows, heads, d), []
    for i, n in enumerate(lengths):
        keys, values = (t[table[i]].flatten(0, 1)[:n].transpose(0, 1).double() for t in (k, v))
        want.append(_attend(q[i].double().reshape(groups, g, d), keys, values, False)[0])
    return (Problem()
            .launch(_decode_group, (rows, groups, splits), parts, lses, q, k, v, table, lengths,
                    d ** -0.5, pages, G=g, D=d, PAGE=page, BN=32, BH=16, SPLITS=splits, num_warps=4,
                    num_stages=2)
            .launch(_decode_join, (rows * heads,), out, parts, lses, D=d, SPLITS=splits, num_warps=1)
            .close(out, torch.stack(want).reshape(out.shape), 4e-3, 4e-3))


@triton.jit
def _forward_descriptors(q, k, v, out, N, scale, D: tl.constexpr, BM: tl.constexpr,
                         BN: tl.constexpr):
    head, row = tl.program_id(1) * N, tl.program_id(0) * BM
    queries = q.load([head + row, 0])
    high = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, N, BN):
        s = tl.dot(queries, k.load([head + start, 0]).T) * scale
        new = tl.maximum(high, tl.max(s, 1))
        p, shrink = tl.exp(s - new[:, None]), tl.exp(high - new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), v.load([head + start, 0]), acc * shrink[:, None])
        high = new
    out.store([head + row, 0], (acc / total[:, None]).to(tl.float16))


@family
def attention_descriptors(data):
    n, d, block = 256, 64, 64
    q, k, v = (data.normal(1, n, d, dtype=torch.float16) for _ in range(3))
    out = torch.zeros_like(q)
    made = [TensorDescriptor.from_tensor(t[0], [block, d]) for t in (q, k, v, out)]
    want, _ = _attend(q.double(), k.double(), v.double(), False)
    return Problem().launch(_forward_descriptors, (n // block, 1), *made, n, d ** -0.5, D=d,
                            BM=block, BN=block, num_warps=4, num_stages=2).close(out, want, 4e-3, 4e-3)
