"""Mixture of experts: routers, alignment, permutations, products by expert."""

import torch
import triton
import triton.language as tl

from .family import Problem, family, half_precision


@triton.jit
def _router(gates, ids, scores, tokens, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
            WIDTH: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < tokens)[:, None] & (column < E)[None, :]
    z = tl.load(scores + row[:, None] * E + column[None, :], mask=inside, other=-float("inf"))
    z = tl.where((row < tokens)[:, None], z, 0.0)
    high = tl.max(z, 1)
    total = tl.zeros((ROWS,), tl.float32)
    chosen = tl.zeros((ROWS, K), tl.float32)
    slot = tl.arange(0, K)[None, :]
    for i in tl.static_range(K):
        best, at = tl.max(z, 1, return_indices=True)
        weight = tl.exp(best - high)
        total += weight
        chosen = tl.where(slot == i, weight[:, None], chosen)
        tl.store(ids + row * K + i, at, mask=row < tokens)
        z = tl.where(column[None, :] == at[:, None], -float("inf"), z)
    tl.store(gates + row[:, None] * K + slot, chosen / total[:, None],
             mask=(row < tokens)[:, None] & (slot < K))


@family
def router_topk(data):
    z = data.normal(30, 60)
    gates, ids = torch.empty(30, 4), torch.empty(30, 4, dtype=torch.int32)
    top = z.double().topk(4)
    return (Problem().launch(_router, (4,), gates, ids, z, 30, E=60, K=4, ROWS=8, WIDTH=64,
                             num_warps=4).equal(ids, top.indices).close(gates, top.values.softmax(1)))


@triton.jit
def _grouped_router(gates, ids, scores, bias, scale, G: tl.constexpr, M: tl.constexpr,
                    CHOSEN: tl.constexpr, K: tl.constexpr):
    """The sum of a group's two best decides which groups count, then the best of those."""
    row = tl.program_id(0)
    group, member = tl.arange(0, G)[:, None], tl.arange(0, M)[None, :]
    place = group * M + member
    p = tl.sigmoid(tl.load(scores + row * G * M + place))
    s = p + tl.load(bias + place)
    first, at = tl.max(s, 1, return_indices=True)
    second = tl.max(tl.where(member == at[:, None], -float("inf"), s), 1)
    rank = first + second
    keep = tl.zeros((G,), tl.int1)
    for _ in tl.static_range(CHOSEN):
        best = tl.argmax(rank, 0)
        keep = keep | (tl.arange(0, G) == best)
        rank = tl.where(tl.arange(0, G) == best, -float("inf"), rank)
    s = tl.where(keep[:, None], s, -float("inf"))
    flat, chance = tl.reshape(s, (G * M,)), tl.reshape(p, (G * M,))
    total = 0.0
    for i in tl.static_range(K):
        best = tl.argmax(flat, 0)
        hit = tl.arange(0, G * M) == best
        weight = tl.sum(tl.where(hit, chance, 0.0), 0)
        total += weight
        tl.store(ids + row * K + i, best)
        tl.store(gates + row * K + i, weight)
        flat = tl.where(hit, -float("inf"), flat)
    tl.debug_barrier()
    slot = tl.arange(0, K)
    weights = tl.load(gates + row * K + slot)
    tl.debug_barrier()
    tl.store(gates + row * K + slot, weights / total * scale)


@family
def router_grouped(data):
    z, bias = data.normal(6, 32), data.normal(32, scale=0.1)
    gates, ids = torch.empty(6, 4), torch.empty(6, 4, dtype=torch.int32)
    p = z.double().sigmoid()
    s = (p + bias.double()).reshape(6, 4, 8)
    groups = s.topk(2, -1).values.sum(-1).topk(2).indices
    allowed = torch.zeros(6, 4, dtype=torch.bool).scatter(1, groups, True)
    chosen = s.masked_fill(~allowed[..., None], -torch.inf).reshape(6, 32).topk(4).indices
    weights = p.gather(1, chosen)
    return (Problem().launch(_grouped_router, (6,), gates, ids, z, bias, 2.5, G=4, M=8, CHOSEN=2,
                             K=4, num_warps=2)
            .equal(ids, chosen).close(gates, 2.5 * weights / weights.sum(1, keepdim=True)))


@triton.jit
def _count_by_expert(counts, ids, n, E: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(counts + tl.load(ids + at, mask=at < n, other=0), 1, mask=at < n)


@triton.jit
def _pad_and_offset(offsets, starts, block_experts, counts, BLOCK: tl.constexpr, E: tl.constexpr,
                    BLOCKS: tl.constexpr):
    e = tl.arange(0, E)
    padded = tl.cdiv(tl.load(counts + e), BLOCK) * BLOCK
    end = tl.cumsum(padded, 0)
    tl.store(offsets + 1 + e, end)
    tl.store(offsets, 0)
    tl.store(starts + e, end - padded)
    block = tl.arange(0, BLOCKS)
    passed = (end[None, :] <= block[:, None] * BLOCK).to(tl.int32)
    tl.store(block_experts + block, tl.minimum(tl.sum(passed, 1), E - 1))


@triton.jit
def _place(places, starts, ids, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    slot = tl.atomic_add(starts + tl.load(ids + at, mask=at < n, other=0), 1, mask=at < n)
    tl.store(places + slot, at, mask=at < n)


@family
def moe_align(data):
    """Rows by expert, each expert's part padded to whole blocks; any order within an expert."""
    n, experts, block, blocks = 100, 8, 16, 16
    ids = data.integers(0, experts, n)
    counts, starts = torch.zeros(2, experts, dtype=torch.int32)
    offsets = torch.empty(experts + 1, dtype=torch.int32)
    owners = torch.empty(blocks, dtype=torch.int32)
    places = torch.full((blocks * block,), n, dtype=torch.int32)
    real = ids.bincount(minlength=experts)
    ends = ((real + block - 1) // block * block).cumsum(0)

    def placed():
        for e in range(experts):
            begin = int(ends[e - 1]) if e else 0
            part = places[begin:begin + int(real[e])].sort().values
            if not torch.equal(part, (ids == e).nonzero()[:, 0].to(torch.int32)):
                return False
        return int((places < n).sum()) == n

    first = torch.arange(blocks) * block
    return (Problem()
            .launch(_count_by_expert, (2,), counts, ids, n, E=experts, B=64, num_warps=2)
            .launch(_pad_and_offset, (1,), offsets, starts, owners, counts, BLOCK=block, E=experts,
                    BLOCKS=blocks, num_warps=4)
            .launch(_place, (2,), places, starts, ids, n, B=64, num_warps=2)
            .equal(offsets[1:], ends).holds(placed)
            .equal(owners, (ends[None] <= first[:, None]).sum(1).clamp(max=experts - 1)))


@triton.jit
def _expert_product(c, a, weights, gates, places, block_experts, n, N, K, TOP: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    block = tl.program_id(0)
    rows = tl.load(places + block * BM + tl.arange(0, BM))
    columns, inner = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    expert = tl.load(block_experts + block)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + (rows // TOP)[:, None] * K + (k + inner)[None, :], mask=rows[:, None] < n,
                    other=0.0)
        acc = tl.dot(x, tl.load(weights + expert * K * N + (k + inner)[:, None] * N
                                + columns[None, :]), acc)
    gate = tl.load(gates + rows, mask=rows < n, other=0.0)
    tl.store(c + rows[:, None] * N + columns[None, :], (acc * gate[:, None]).to(c.dtype.element_ty),
             mask=rows[:, None] < n)


@family
def moe_product(data):
    tokens, top, experts, k, n, block = 20, 2, 4, 64, 64, 16
    a = data.normal(tokens, k, dtype=torch.float16, scale=0.3)
    w = data.normal(experts, k, n, dtype=torch.float16, scale=0.3)
    ids, gates = data.integers(0, experts, tokens * top), data.normal(tokens * top).abs()
    places, owners = [], []
    for e in range(experts):
        mine = (ids == e).nonzero()[:, 0].tolist()
        mine += [tokens * top] * (-len(mine) % block)
        places += mine
        owners += [e] * (len(mine) // block)
    c = torch.empty(tokens * top, n)
    source = a.double().repeat_interleave(top, 0)
    want = torch.einsum("rk,rkn->rn", source, w.double()[ids.long()]) * gates.double()[:, None]
    return (Problem().launch(_expert_product, (len(owners), 2), c, a, w, gates,
                             torch.tensor(places, dtype=torch.int32),
                             torch.tensor(owners, dtype=torch.int32), tokens * top, n, k, TOP=top,
                             BM=block, BN=32, BK=32, num_warps=4).close(c, want, atol=2e-5))


@triton.jit
def _combine(out, rows, gates, places, D, K: tl.constexpr, B: tl.constexpr):
    token, at = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for i in tl.static_range(K):
        place = tl.load(places + token * K + i)
        if place >= 0:
            row = tl.load(rows + place * D + at, mask=at < D, other=0.0)
            total += tl.load(gates + token * K + i) * row
    tl.store(out + token * D + at, total.to(out.dtype.element_ty), mask=at < D)


@family
def moe_combine(data):
    """Of two rows a token, some dropped."""
    rows, gates = data.normal(20, 100, dtype=torch.bfloat16), data.normal(10, 2)
    places = data.permutation(20).reshape(10, 2).to(torch.int32)
    places[places % 7 == 0] = -1
    out = torch.empty(10, 100, dtype=torch.bfloat16)
    kept = (places >= 0).double() * gates.double()
    want = (rows.double()[places.clamp(min=0).long()] * kept[..., None]).sum(1)
    return (Problem().launch(_combine, (10, 2), out, rows, gates, places, 100, K=2, B=64,
                             num_warps=2).close(out, want, *half_precision(out)))


@triton.jit
def _permute(out, x, places, D, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    place = tl.load(places + row)
    tl.store(out + place * D + at, tl.load(x + row * D + at, mask=at < D), mask=at < D)


@family
def moe_permute(data):
    x, places = data.normal(12, 80), data.permutation(12).to(torch.int32)
    out = torch.empty_like(x)
    want = torch.empty_like(x)
    want[places.long()] = x
    return Problem().launch(_permute, (12,), out, x, places, 80, B=128, num_warps=4).equal(out, want)


@triton.jit
def _balance(loss, probs, ids, tokens, K: tl.constexpr, E: tl.constexpr, B: tl.constexpr):
    """experts x sum over experts of the share of rows times the mean probability."""
    e = tl.arange(0, E)
    mass, rows = tl.zeros((E,), tl.float32), tl.zeros((E,), tl.int32)
    for start in range(0, tokens, B):
        t = start + tl.arange(0, B)
        inside = (t < tokens)[:, None]
        mass += tl.sum(tl.load(probs + t[:, None] * E + e[None, :], mask=inside, other=0.0), 0)
        for i in tl.static_range(K):
            id = tl.load(ids + t * K + i, mask=t < tokens, other=-1)
            rows += tl.sum((id[:, None] == e[None, :]).to(tl.int32), 0)
    share = rows.to(tl.float32) / (tokens * K)
    tl.store(loss, E * tl.sum(share * mass / tokens, 0))


@family
def moe_balance_loss(data):
    p = data.normal(50, 16).softmax(1)
    ids, loss = p.topk(2).indices.to(torch.int32), torch.empty(1)
    share = ids.flatten().bincount(minlength=16).double() / 100
    want = 16 * (share * p.double().mean(0)).sum()
    return (Problem().launch(_balance, (1,), loss, p, ids, 50, K=2, E=16, B=32, num_warps=4)
            .close(loss, want.reshape(1)))


@triton.jit
def _four_bit_experts(out, x, codes, scales, experts, K, N, BM: tl.constexpr, BN: tl.constexpr,
                      BK: tl.constexpr):
    """Half-precision rows times weights of 4 bits that share a scale in groups of 32."""
    expert = tl.load(experts + tl.program_id(0))
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    at = expert * N + columns
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(x + rows[:, None] * K + (k + tl.arange(0, BK))[None, :])
        b = tl.load(codes + (k // 2 + tl.arange(0, BK // 2))[:, None] + at[None, :] * (K // 2))
        s = tl.load(scales + at[:, None] * (K // 32) + (k // 32 + tl.arange(0, BK // 32))[None, :])
        acc = tl.dot_scaled(a, None, "bf16", b, s, "e2m1", acc)
    tl.store(out + rows[:, None] * N + columns[None, :], acc)


@family
def moe_mxfp4(data):
    """As gpt-oss keeps its experts: numbers of e2m1, two a byte, scales that are powers of two."""
    k, n, tiles = 128, 64, 2
    x = data.normal(32 * tiles, k, dtype=torch.bfloat16)
    codes = data.integers(0, 256, 3, n, k // 2, dtype=torch.uint8)
    scales = data.integers(122, 132, 3, n, k // 32, dtype=torch.uint8)
    experts, out = torch.tensor([2, 0], dtype=torch.int32), torch.empty(32 * tiles, n)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = torch.cat([numbers, -numbers])
    pairs = torch.stack([numbers[(codes & 15).long()], numbers[(codes >> 4).long()]], -1)
    weights = pairs.flatten(2) * torch.exp2(scales.double() - 127).repeat_interleave(32, 2)
    want = torch.cat([x[32 * i:32 * i + 32].double() @ weights[e].T for i, e in enumerate(experts)])
    return Problem().launch(_four_bit_experts, (tiles, 2), out, x, codes, scales, experts, k, n,
                            BM=32, BN=32, BK=64, num_warps=4, num_stages=2).close(
        out, want, 1e-4, 1e-2)


@triton.jit
def _expert_descriptors(out, x, weights, tokens, experts, T, K, N, E: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Gathered rows; the weights of all experts are one tensor of three dimensions."""
    matrix = tl.make_tensor_descriptor(weights, [E, N, K], [N * K, K, 1], [1, BN, BK])
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    expert, token = tl.load(experts + tl.program_id(0)), tl.load(tokens + rows)
    first = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(x + token[:, None] * K + (k + tl.arange(0, BK))[None, :],
                    mask=token[:, None] < T, other=0.0)
        acc = tl.dot(a, matrix.load([expert, first, k]).reshape(BN, BK).T, acc)
    columns = first + tl.arange(0, BN)
    tl.store(out + rows[:, None] * N + columns[None, :], acc, mask=token[:, None] < T)


@family
def moe_product_descriptors(data):
    """Tiles of 32 places, of which some stay empty: token 20 does not exist."""
    t, k, n = 20, 320, 64
    x = data.normal(t, k, dtype=torch.float16, scale=0.3)
    weights = data.normal(3, n, k, dtype=torch.float16, scale=0.3)
    tokens = torch.full((64,), t, dtype=torch.int32)
    tokens[:10], tokens[32:45] = data.permutation(t)[:10], data.permutation(t)[:13]
    experts, out = torch.tensor([2, 0], dtype=torch.int32), torch.zeros(64, n)
    padded = torch.cat([x, torch.zeros_like(x[:1])])[tokens].double().reshape(2, 32, k)
    want = padded @ weights[experts].double().mT
    return Problem().launch(_expert_descriptors, (2, 2), out, x, weights, tokens, experts, t, k, n,
                            E=3, BM=32, BN=32, BK=64, num_warps=4, num_stages=1).close(
        out, want.flatten(0, 1), 1e-4, 1e-4)
