"""Matrix products: mma, wgmma, tensor maps, split k, persistent, scaled, grouped."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .family import Problem, family, half_precision


@triton.jit
def _matmul(c, a, b, M, N, K, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            ACC: tl.constexpr, PRECISION: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), ACC)
    for k in range(0, K, BK):
        x = tl.load(a + rows[:, None] * am + (k + inner)[None, :] * ak,
                    mask=(rows[:, None] < M) & ((k + inner)[None, :] < K), other=0.0)
        y = tl.load(b + (k + inner)[:, None] * bk + columns[None, :] * bn,
                    mask=((k + inner)[:, None] < K) & (columns[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=ACC)
    tl.store(c + rows[:, None] * N + columns[None, :], acc.to(c.dtype.element_ty),
             mask=(rows[:, None] < M) & (columns[None, :] < N))


def product(data, a, b, out, *, block=(64, 64, 32), transposed=False, precision="tf32", stages=3,
            tolerance=None, warps=4, **options):
    """A problem of one product; `transposed` b is stored as its rows of columns."""
    (m, k), n = a.shape, b.shape[0 if transposed else 1]
    c = torch.empty(m, n, dtype=out)
    strides = (1, k) if transposed else (n, 1)
    acc = tl.int32 if out == torch.int32 else tl.float32
    grid = (triton.cdiv(m, block[0]), triton.cdiv(n, block[1]))
    want = a.double() @ (b.T if transposed else b).double()
    rtol, atol = tolerance or half_precision(c)
    return Problem().launch(_matmul, grid, c, a, b, m, n, k, k, 1, *strides, BM=block[0],
                            BN=block[1], BK=block[2], ACC=acc, PRECISION=precision,
                            num_warps=warps, num_stages=stages, **options).close(c, want, rtol, atol)


@family
def matmul_half(data):
    """Multiples of 16, so copies of 16 bytes, and a remainder of k."""
    return product(data, data.normal(96, 80, dtype=torch.float16, scale=0.3),
                   data.normal(80, 112, dtype=torch.float16, scale=0.3), torch.float16)


@family
def matmul_bfloat_transposed(data):
    return product(data, data.normal(64, 128, dtype=torch.bfloat16, scale=0.2),
                   data.normal(64, 128, dtype=torch.bfloat16, scale=0.2), torch.bfloat16,
                   transposed=True, stages=2)


@family
def matmul_unaligned(data):
    return product(data, data.normal(50, 37, dtype=torch.float16, scale=0.3),
                   data.normal(37, 45, dtype=torch.float16, scale=0.3), torch.float32,
                   tolerance=(1e-5, 1e-5))


@family
def matmul_eight_warps(data):
    """Two warpgroups on sm_90."""
    return product(data, data.normal(128, 128, dtype=torch.float16, scale=0.2),
                   data.normal(128, 128, dtype=torch.float16, scale=0.2), torch.float16,
                   block=(128, 64, 64), stages=3, warps=8)


@family
def matmul_tf32(data):
    return product(data, data.normal(64, 96), data.normal(96, 64), torch.float32,
                   tolerance=(0, 96 * 2**-10))  # 11 bits of each factor


@family
def matmul_ieee(data):
    return product(data, data.normal(40, 48), data.normal(48, 40), torch.float32,
                   block=(32, 32, 16), precision="ieee", tolerance=(1e-5, 1e-5))


@family
def matmul_tf32x3(data):
    return product(data, data.normal(48, 64), data.normal(64, 48), torch.float32,
                   block=(32, 32, 32), precision="tf32x3", tolerance=(1e-4, 1e-4))


@family
def matmul_int8(data):
    a, b = data.integers(-128, 128, 64, 96, dtype=torch.int8), data.integers(
        -128, 128, 64, 96, dtype=torch.int8)
    return product(data, a, b, torch.int32, transposed=True, tolerance=(0, 0))


@family(chips=("sm_89", "sm_90"))
def matmul_fp8(data):
    """Eight-bit factors; Hopper's tensor cores keep 14 bits of a sum, so the sums stay short."""
    a, b = (data.normal(64, 128, scale=0.5).to(torch.float8_e4m3fn) for _ in range(2))
    return product(data, a, b, torch.float32, transposed=True, block=(64, 64, 64),
                   tolerance=(1e-3, 1e-3))


@triton.jit
def _bias_gelu_product(c, a, b, bias, scale, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                       BK: tl.constexpr, GROUP: tl.constexpr):
    program = tl.program_id(0)
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = program // (GROUP * across) * GROUP
    size = min(down - first, GROUP)
    row = first + program % (GROUP * across) % size
    column = program % (GROUP * across) // size
    rows = (row * BM + tl.arange(0, BM)) % M
    columns = (column * BN + tl.arange(0, BN)) % N
    inner = tl.arange(0, BK)
    x = a + rows[:, None] * K + inner[None, :]
    y = b + inner[:, None] * N + columns[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        acc += tl.dot(tl.load(x, mask=inner[None, :] < K - k * BK, other=0.0),
                      tl.load(y, mask=inner[:, None] < K - k * BK, other=0.0))
        x += BK
        y += BK * N
    z = acc * scale + tl.load(bias + columns)[None, :]
    z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    tl.store(c + rows[:, None] * N + columns[None, :], z.to(c.dtype.element_ty),
             mask=(rows[:, None] < M) & (columns[None, :] < N))


@family
def matmul_bias_gelu(data):
    a = data.normal(80, 64, dtype=torch.float16, scale=0.3)
    b = data.normal(64, 96, dtype=torch.float16, scale=0.3)
    bias, c = data.normal(96), torch.empty(80, 96, dtype=torch.float16)
    want = torch.nn.functional.gelu(1.5 * (a.double() @ b.double()) + bias.double())
    return Problem().launch(_bias_gelu_product, (9,), c, a, b, bias, 1.5, 80, 96, 64, BM=32, BN=32,
                            BK=32, GROUP=2, num_warps=4).close(c, want, *half_precision(c))


@triton.jit
def _persistent(c, a, b, M, N, K, PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):
    across = tl.cdiv(N, BN)
    inner = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * across, PROGRAMS, flatten=True):
        rows = tile // across * BM + tl.arange(0, BM)
        columns = tile % across * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = tl.load(a + rows[:, None] * K + k + inner[None, :], mask=rows[:, None] < M, other=0.0)
            y = tl.load(b + (k + inner)[:, None] * N + columns[None, :],
                        mask=columns[None, :] < N, other=0.0)
            acc = tl.dot(x, y, acc)
        tl.store(c + rows[:, None] * N + columns[None, :], acc.to(c.dtype.element_ty),
                 mask=(rows[:, None] < M) & (columns[None, :] < N))


@family
def matmul_persistent(data):
    a = data.normal(144, 64, dtype=torch.float16, scale=0.3)
    b = data.normal(64, 128, dtype=torch.float16, scale=0.3)
    c = torch.empty(144, 128, dtype=torch.float16)
    return Problem().launch(_persistent, (2,), c, a, b, 144, 128, 64, PROGRAMS=2, BM=64, BN=64,
                            BK=32, num_warps=4).close(c, a.double() @ b.double(), *half_precision(c))


@triton.jit
def _split_k(c, a, b, M, N, K, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.program_id(2) * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK * SPLITS):
        x = tl.load(a + rows[:, None] * K + (k + inner)[None, :], mask=(k + inner)[None, :] < K,
                    other=0.0)
        y = tl.load(b + (k + inner)[:, None] * N + columns[None, :],
                    mask=(k + inner)[:, None] < K, other=0.0)
        acc = tl.dot(x, y, acc)
    tl.atomic_add(c + rows[:, None] * N + columns[None, :], acc,
                  mask=(rows[:, None] < M) & (columns[None, :] < N))


@family
def matmul_split_k(data):
    a = data.normal(32, 160, dtype=torch.float16, scale=0.3)
    b = data.normal(160, 32, dtype=torch.float16, scale=0.3)
    c = torch.zeros(32, 32)
    return Problem().launch(_split_k, (1, 1, 3), c, a, b, 32, 32, 160, SPLITS=3, BM=32, BN=32,
                            BK=32, num_warps=2).close(c, a.double() @ b.double(), atol=2e-5)


@triton.jit
def _split_k_last(c, parts, counters, a, b, N, K, SPLITS: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr):
    """The program that comes last at a tile adds the parts in order: equal sums every time."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    split = tl.program_id(1)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(split * BK, K, BK * SPLITS):
        inner = k + tl.arange(0, BK)
        acc = tl.dot(tl.load(a + rows[:, None] * K + inner[None, :]),
                     tl.load(b + inner[:, None] * N + columns[None, :]), acc)
    place = rows[:, None] * N + columns[None, :]
    size = tl.num_programs(0) * BM * N
    tl.store(parts + split * size + place, acc)
    tl.debug_barrier()
    if tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1:
        total = tl.zeros((BM, BN), tl.float32)
        for i in range(SPLITS):
            total += tl.load(parts + i * size + place)
        tl.store(c + place, total)


@family
def matmul_split_k_last(data):
    a = data.normal(64, 128, dtype=torch.float16, scale=0.3)
    b = data.normal(128, 32, dtype=torch.float16, scale=0.3)
    c, parts = torch.empty(64, 32), torch.empty(4, 64, 32)
    counters = torch.zeros(2, dtype=torch.int32)
    return Problem().launch(_split_k_last, (2, 4), c, parts, counters, a, b, 32, 128, SPLITS=4,
                            BM=32, BN=32, BK=32, num_warps=4).close(c, a.double() @ b.double(),
                                                                    atol=2e-5)


@triton.jit
def _descriptor_product(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(a.load([row, k]), b.load([column, k]).T, acc)
    c.store([row, column], acc.to(tl.float16))


@triton.jit
def _specialised_product(a, b, c, across, tiles, K, PROGRAMS: tl.constexpr, BM: tl.constexpr,
                         BN: tl.constexpr, BK: tl.constexpr):
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, warp_specialize=True, flatten=False):
        row, column = tile // across * BM, tile % across * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a.load([row, k]), b.load([column, k]).T, acc)
        c.store([row, column], acc.to(tl.float16))


def _descriptors(data, m, n, k, block):
    a, b = (data.normal(size, k, dtype=torch.float16, scale=0.3) for size in (m, n))
    c = torch.zeros(m, n, dtype=torch.float16)
    bm, bn, bk = block
    made = [TensorDescriptor.from_tensor(t, list(extent))
            for t, extent in ((a, (bm, bk)), (b, (bn, bk)), (c, (bm, bn)))]
    return a, b, c, made


@family
def matmul_descriptors(data):
    """Tensor maps of the host; the last tiles reach over the edges."""
    a, b, c, made = _descriptors(data, 80, 72, 288, (64, 64, 64))
    return Problem().launch(_descriptor_product, (2, 2), *made, 288, BM=64, BN=64, BK=64,
                            num_warps=4, num_stages=3).close(
        c, a.double() @ b.double().T, *half_precision(c))


@family(chips=("sm_90",), own_race="race: writes c.*which warp .*cp.async.bulk.tensor.2d.global")
def matmul_warp_specialised(data):
    """Warps of their own load; two programs share three tiles.

    Triton 3.9 lets both groups of warps that multiply store the whole tile: equal bytes, but a race.
    """
    a, b, c, made = _descriptors(data, 64, 192, 128, (64, 64, 64))
    return Problem().launch(_specialised_product, (2,), *made, 3, 3, 128, PROGRAMS=2, BM=64, BN=64,
                            BK=64, num_warps=4, num_stages=2).close(
        c, a.double() @ b.double().T, *half_precision(c))


@triton.jit
def _device_descriptor_product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                               BK: tl.constexpr):
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(left.load([row, k]), right.load([column, k]).T, acc)
    out.store([row, column], acc.to(tl.float16))


@family
def matmul_device_descriptors(data):
    """Tensor maps that the kernel makes in its scratch memory."""
    a, b = (data.normal(96, 288, dtype=torch.float16, scale=0.3) for _ in range(2))
    c = torch.zeros(96, 96, dtype=torch.float16)
    return Problem().launch(_device_descriptor_product, (2, 2), a, b, c, 96, 96, 288, BM=64, BN=64,
                            BK=64, num_warps=4).close(c, a.double() @ b.double().T,
                                                      *half_precision(c))


@family
def matmul_batched(data):
    a = data.normal(3, 32, 64, dtype=torch.bfloat16, scale=0.3)
    b = data.normal(3, 64, 32, dtype=torch.bfloat16, scale=0.3)
    c = torch.empty(3, 32, 32)
    return Problem().launch(_batched, (3,), c, a, b, B=32, K=64, num_warps=4).close(
        c, a.double() @ b.double())


@triton.jit
def _batched(c, a, b, B: tl.constexpr, K: tl.constexpr):
    batch = tl.program_id(0)
    i, k = tl.arange(0, B), tl.arange(0, K)
    x = tl.load(a + batch * B * K + i[:, None] * K + k[None, :])
    y = tl.load(b + batch * B * K + k[:, None] * B + i[None, :])
    tl.store(c + batch * B * B + i[:, None] * B + i[None, :], tl.dot(x, y))


@triton.jit
def _grouped(c, a, weights, offsets, N, K, E: tl.constexpr, PROGRAMS: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows of one group after the other, each times the weights of its group."""
    tile = tl.program_id(0)
    passed = 0
    for e in range(E):
        begin, end = tl.load(offsets + e), tl.load(offsets + e + 1)
        across = tl.cdiv(N, BN)
        tiles = tl.cdiv(end - begin, BM) * across
        while tile >= passed and tile < passed + tiles:
            rows = begin + (tile - passed) // across * BM + tl.arange(0, BM)
            columns = (tile - passed) % across * BN + tl.arange(0, BN)
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(0, K, BK):
                inner = k + tl.arange(0, BK)
                x = tl.load(a + rows[:, None] * K + inner[None, :], mask=rows[:, None] < end,
                            other=0.0)
                acc = tl.dot(x, tl.load(weights + e * K * N + inner[:, None] * N
                                        + columns[None, :]), acc)
            tl.store(c + rows[:, None] * N + columns[None, :], acc, mask=rows[:, None] < end)
            tile += PROGRAMS
        passed += tiles


@family
def grouped_gemm(data):
    counts = torch.tensor([0, 40, 0, 7, 32, 1])
    offsets = counts.cumsum(0).to(torch.int32)
    a = data.normal(80, 64, dtype=torch.float16, scale=0.3)
    w = data.normal(5, 64, 64, dtype=torch.float16, scale=0.3)
    c = torch.empty(80, 64)
    groups = torch.repeat_interleave(torch.arange(5), counts[1:])
    return Problem().launch(_grouped, (3,), c, a, w, offsets, 64, 64, E=5, PROGRAMS=3, BM=32, BN=32,
                            BK=32, num_warps=4).close(
        c, torch.einsum("rk,rkn->rn", a.double(), w.double()[groups]), atol=2e-5)


@triton.jit
def _packed_weights(c, a, packed, scales, N, K, GROUP: tl.constexpr, BM: tl.constexpr,
                    BN: tl.constexpr, BK: tl.constexpr):
    """Weights of four bits, two a byte along k, a scale for each group of rows."""
    rows, columns = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        pair = k // 2 + tl.arange(0, BK // 2)
        byte = tl.load(packed + pair[:, None] * N + columns[None, :])
        low, high = (byte & 15).to(tl.float16) - 8, (byte >> 4).to(tl.float16) - 8
        both = tl.reshape(tl.trans(tl.join(low, high), 0, 2, 1), (BK, BN))
        scale = tl.load(scales + (k // GROUP) * N + columns)
        x = tl.load(a + rows[:, None] * K + k + tl.arange(0, BK)[None, :])
        acc = tl.dot(x, both * scale[None, :].to(tl.float16), acc)
    tl.store(c + rows[:, None] * N + columns[None, :], acc)


@family
def matmul_int4_weights(data):
    a = data.normal(32, 128, dtype=torch.float16, scale=0.3)
    w = data.integers(0, 16, 128, 64, dtype=torch.uint8)
    scales = torch.exp2(data.integers(-4, 0, 2, 64).float())
    c = torch.empty(32, 64)
    real = (w.double() - 8) * scales.double().repeat_interleave(64, 0)
    return Problem().launch(_packed_weights, (2,), c, a, w[0::2] | w[1::2] << 4, scales, 64, 128,
                            GROUP=64, BM=32, BN=32, BK=32, num_warps=4).close(
        c, a.double() @ real, atol=5e-5)


@triton.jit
def _block_scaled(c, a, b, a_scales, b_scales, N, K, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K // BK):
        inner = k * BK + tl.arange(0, BK)
        x = tl.load(a + rows[:, None] * K + inner[None, :])
        y = tl.load(b + columns[None, :] * K + inner[:, None])
        scale = tl.load(a_scales + rows * (K // BK) + k)[:, None] * tl.load(b_scales + k)
        acc += tl.dot(x, y) * scale
    tl.store(c + rows[:, None] * N + columns[None, :], acc)


@family(chips=("sm_89", "sm_90"))
def matmul_fp8_block_scaled(data):
    a, b = (data.normal(64, 128, scale=0.5).to(torch.float8_e4m3fn) for _ in range(2))
    sa, sb = data.normal(64, 2).abs(), data.normal(2).abs()
    c = torch.empty(64, 64)
    want = sum((a.double()[:, s] @ b.double()[:, s].T) * sa.double()[:, i:i + 1] * sb.double()[i]
               for i, s in enumerate((slice(0, 64), slice(64, 128))))
    return Problem().launch(_block_scaled, (1,), c, a, b, sa, sb, 64, 128, BM=64, BN=64, BK=64,
                            num_warps=4).close(c, want, 1e-3, 1e-3)


@family(chips=("sm_90",))
def matmul_cluster(data):
    """Two blocks a program."""
    return product(data, data.normal(128, 64, dtype=torch.float16, scale=0.3),
                   data.normal(64, 128, dtype=torch.float16, scale=0.3), torch.float16,
                   block=(128, 128, 32), num_ctas=2)
