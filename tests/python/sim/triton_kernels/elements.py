"""Elementwise kernels, random numbers, quantisation, layouts, convolutions."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .family import Problem, family, half_precision


@triton.jit
def _add(out, x, y, n, PROGRAMS: tl.constexpr, B: tl.constexpr):
    for start in range(tl.program_id(0) * B, n, PROGRAMS * B):
        at = start + tl.arange(0, B)
        tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@family
def add_in_strides(data):
    x, y = data.normal(1000), data.normal(1000)
    out = torch.empty(1000)
    return (Problem().launch(_add, (2,), out, x, y, 1000, PROGRAMS=2, B=128, num_warps=4)
            .equal(out, x + y))


@triton.jit
def _functions(out, x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    z = tl.load(x + at, mask=at < n, other=1.0)
    tl.store(out + at, libdevice.tanh(z), mask=at < n)
    tl.store(out + n + at, tl.erf(z), mask=at < n)
    tl.store(out + 2 * n + at, libdevice.log1p(tl.abs(z)), mask=at < n)
    tl.store(out + 3 * n + at, tl.sin(z) + tl.cos(z), mask=at < n)
    tl.store(out + 4 * n + at, libdevice.pow(tl.abs(z), 1.5), mask=at < n)
    tl.store(out + 5 * n + at, tl.sqrt_rn(tl.abs(z)) + tl.div_rn(z, 3.0), mask=at < n)


@family
def library_functions(data):
    x, out = data.normal(200), torch.empty(6, 200)
    d = x.double()
    want = torch.stack([d.tanh(), d.erf(), d.abs().log1p(), d.sin() + d.cos(), d.abs() ** 1.5,
                        d.abs().sqrt() + d / 3])
    return (Problem().launch(_functions, (2,), out, x, 200, B=128, num_warps=4)
            .close(out, want))


@triton.jit
def _swiglu(out, x, columns, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    gate = tl.load(x + 2 * row * columns + at, mask=at < columns).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * columns + at, mask=at < columns).to(tl.float32)
    z = gate * tl.sigmoid(gate) * up
    tl.store(out + row * columns + at, z.to(out.dtype.element_ty), mask=at < columns)


@family
def swiglu(data):
    x = data.normal(5, 2, 300, dtype=torch.bfloat16)
    out = torch.empty(5, 300, dtype=torch.bfloat16)
    d = x.double()
    return (Problem().launch(_swiglu, (5,), out, x, 300, B=512, num_warps=4)
            .close(out, torch.nn.functional.silu(d[:, 0]) * d[:, 1], *half_precision(out)))


@triton.jit
def _rotary(x, angles, heads, D: tl.constexpr):
    """In place: halves of a head turn by the token's angles."""
    token, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, D // 2)
    place = x + (token * heads + head) * D + at
    a, b = tl.load(place), tl.load(place + D // 2)
    angle = tl.load(angles + token * (D // 2) + at)
    tl.store(place, a * tl.cos(angle) - b * tl.sin(angle))
    tl.store(place + D // 2, b * tl.cos(angle) + a * tl.sin(angle))


@family
def rotary(data):
    x, angles = data.normal(4, 2, 64), data.normal(4, 32, scale=3.0)
    a, b = x.double().chunk(2, -1)
    c, s = angles.double().cos()[:, None], angles.double().sin()[:, None]
    return (Problem().launch(_rotary, (4, 2), x, angles, 2, D=64, num_warps=1)
            .close(x, torch.cat([a * c - b * s, b * c + a * s], -1)))


@triton.jit
def _dropout(out, kept, x, p, seed, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    keep = tl.rand(seed, at) > p
    z = tl.load(x + at, mask=at < n)
    tl.store(out + at, tl.where(keep, z / (1 - p), 0.0), mask=at < n)
    tl.store(kept + at, keep, mask=at < n)


def philox(seed, counter, rounds=10):
    """The first word of Philox 4x32 at (counter, 0, 0, 0) with the key (seed, 0)."""
    c, k = [counter, 0, 0, 0], [seed, 0]
    for _ in range(rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


@family
def dropout_philox(data):
    x, out = data.normal(300), torch.empty(300)
    kept = torch.empty(300, dtype=torch.bool)
    words = torch.tensor([philox(1234, i) for i in range(300)])
    signed = torch.where(words >= 2**31, 2**32 - 1 - words, words)  # as tl.rand folds its words
    keep = signed.double() * 4.6566127342e-10 > 0.25
    return (Problem().launch(_dropout, (3,), out, kept, x, 0.25, 1234, 300, B=128, num_warps=4)
            .equal(kept, keep).close(out, x.double() / 0.75 * keep))


@triton.jit
def _normals(out, seed, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, tl.randn(seed, at), mask=at < n)
    tl.store(out + n + at, tl.randint(seed, at).to(tl.uint32, bitcast=True).to(tl.float32),
             mask=at < n)


@family
def random_numbers(data):
    """The moments of the normals; the words themselves are Philox's."""
    out = torch.empty(2, 1000)
    words = torch.tensor([philox(7, i) for i in range(1000)])
    return (Problem().launch(_normals, (4,), out, 7, 1000, B=256, num_warps=4)
            .close(out[1], words, 1e-6)
            .holds(lambda: abs(float(out[0].mean())) < 0.15 and abs(float(out[0].std()) - 1) < 0.1))


@triton.jit
def _quantise_rows(out, scales, x, columns, TOP: tl.constexpr, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    z = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(z), 0), 1e-10) / TOP
    q = z / scale
    if out.dtype.element_ty == tl.int8:
        q = libdevice.rint(q)
    tl.store(out + row * columns + at, q.to(out.dtype.element_ty), mask=at < columns)
    tl.store(scales + row, scale)


def _quantised(data, dtype, top, step):
    x = data.normal(6, 200, dtype=torch.bfloat16)
    out, scales = torch.empty(6, 200, dtype=dtype), torch.empty(6)
    want = x.double().abs().amax(1) / top

    def near():
        # A value may fall to either side where the quotient is rounded.
        error = (out.double() * want[:, None] - x.double()).abs()
        return bool((error <= step(out.double().abs()) * want[:, None]).all())

    return (Problem().launch(_quantise_rows, (6,), out, scales, x, 200, TOP=top, B=256, num_warps=4)
            .close(scales, want).holds(near))


@family
def quantise_int8(data):
    return _quantised(data, torch.int8, 127.0, lambda q: 0.5 + 1e-4)


@family(chips=("sm_89", "sm_90"))
def quantise_fp8(data):
    return _quantised(data, torch.float8_e4m3fn, 448.0, lambda q: (q / 15).clamp(min=2**-9))


@triton.jit
def _to_fp8_and_back(out, x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    z = tl.load(x + at, mask=at < n)
    tl.store(out + at, z.to(tl.float8e5).to(tl.float32), mask=at < n)


@family
def fp8_e5m2_conversion(data):
    x, out = data.normal(300), torch.empty(300)
    return (Problem().launch(_to_fp8_and_back, (3,), out, x, 300, B=128, num_warps=4)
            .equal(out, x.to(torch.float8_e5m2).float()))


@triton.jit
def _dequantise(out, packed, scales, n, GROUP: tl.constexpr, B: tl.constexpr):
    """Four-bit numbers, two a byte, a power of two for each group, interleaved."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    byte = tl.load(packed + at, mask=at < n, other=0)
    both = tl.interleave((byte & 15).to(tl.int32) - 8, (byte >> 4).to(tl.int32) - 8)
    place = tl.program_id(0) * 2 * B + tl.arange(0, 2 * B)
    exponent = tl.load(scales + place // GROUP, mask=place < 2 * n, other=127).to(tl.int32)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(out + place, both * factor, mask=place < 2 * n)


@family
def dequantise_groups(data):
    q = data.integers(0, 16, 256, dtype=torch.uint8)
    exponents = data.integers(120, 134, 8, dtype=torch.uint8)
    out = torch.empty(256)
    want = (q.double() - 8) * torch.exp2(exponents.double() - 127).repeat_interleave(32)
    return (Problem().launch(_dequantise, (2,), out, q[0::2] | q[1::2] << 4, exponents, 128,
                             GROUP=32, B=64, num_warps=2).equal(out, want))


@triton.jit
def _transpose(out, x, M, N, B: tl.constexpr):
    i, j = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    z = tl.load(x + i[:, None] * N + j[None, :], mask=(i < M)[:, None] & (j < N)[None, :])
    tl.store(out + j[:, None] * M + i[None, :], tl.trans(z), mask=(j < N)[:, None] & (i < M)[None, :])


@family
def transpose(data):
    x, out = data.normal(50, 70), torch.empty(70, 50)
    return Problem().launch(_transpose, (2, 3), out, x, 50, 70, B=32, num_warps=4).equal(out, x.T)


@triton.jit
def _gather(out, x, places, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(out + at, tl.gather(tl.load(x + at), tl.load(places + at), AXIS))


@family
def gather_rows(data):
    x, places = data.normal(32, 16), data.integers(0, 32, 32, 16)
    out = torch.empty(32, 16)
    return (Problem().launch(_gather, (1,), out, x, places, R=32, C=16, AXIS=0, num_warps=4)
            .equal(out, x.gather(0, places.long())))


@family
def gather_columns(data):
    x, places = data.normal(8, 64), data.integers(0, 64, 8, 64)
    out = torch.empty(8, 64)
    return (Problem().launch(_gather, (1,), out, x, places, R=8, C=64, AXIS=1, num_warps=2)
            .equal(out, x.gather(1, places.long())))


@triton.jit
def _embedding(out, table, ids, D, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    id = tl.load(ids + row)
    tl.store(out + row * D + at, tl.load(table + id * D + at, mask=at < D), mask=at < D)


@family
def embedding(data):
    table, ids = data.normal(30, 100, dtype=torch.float16), data.integers(0, 30, 9, dtype=torch.int64)
    out = torch.empty(9, 100, dtype=torch.float16)
    return (Problem().launch(_embedding, (9,), out, table, ids, 100, B=128, num_warps=1)
            .equal(out, table[ids]))


@triton.jit
def _embedding_backward(grad, dout, ids, D, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    id = tl.load(ids + row)
    tl.atomic_add(grad + id * D + at, tl.load(dout + row * D + at, mask=at < D), mask=at < D)


@family
def embedding_backward(data):
    dout, ids = data.normal(12, 60), data.integers(0, 5, 12, dtype=torch.int64)
    grad = torch.zeros(5, 60)
    return (Problem().launch(_embedding_backward, (12,), grad, dout, ids, 60, B=64, num_warps=2)
            .close(grad, torch.zeros(5, 60).double().index_add(0, ids, dout.double())))


@triton.jit
def _conv2d(out, x, weight, H, W, C: tl.constexpr, F: tl.constexpr, B: tl.constexpr):
    """3 x 3, no padding, as nine products; channels last."""
    place = tl.program_id(0) * B + tl.arange(0, B)
    across = W - 2
    row, column = place // across, place % across
    inside = place < (H - 2) * across
    c, f = tl.arange(0, C), tl.arange(0, F)
    acc = tl.zeros((B, F), tl.float32)
    for i in range(3):
        for j in range(3):
            pixel = (row + i) * W + column + j
            z = tl.load(x + pixel[:, None] * C + c[None, :], mask=inside[:, None], other=0.0)
            w = tl.load(weight + (i * 3 + j) * C * F + c[:, None] * F + f[None, :])
            acc = tl.dot(z, w, acc)
    tl.store(out + place[:, None] * F + f[None, :], acc, mask=inside[:, None])


@family
def conv2d(data):
    x = data.normal(9, 10, 16, dtype=torch.float16, scale=0.3)
    w = data.normal(3, 3, 16, 16, dtype=torch.float16, scale=0.3)
    out = torch.empty(7, 8, 16)
    want = torch.nn.functional.conv2d(x.double().permute(2, 0, 1)[None],
                                      w.double().permute(3, 2, 0, 1))[0].permute(1, 2, 0)
    return (Problem().launch(_conv2d, (2,), out, x, w, 9, 10, C=16, F=16, B=32, num_warps=4)
            .close(out, want, atol=2e-5))


@triton.jit
def _causal_conv(out, x, weight, T, D: tl.constexpr, WIDTH: tl.constexpr, B: tl.constexpr):
    t, d = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, D)
    acc = tl.zeros((B, D), tl.float32)
    for i in tl.static_range(WIDTH):
        at = t - (WIDTH - 1) + i
        inside = ((at >= 0) & (t < T))[:, None]
        z = tl.load(x + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        acc += z * tl.load(weight + d * WIDTH + i)[None, :]
    tl.store(out + t[:, None] * D + d[None, :], acc * tl.sigmoid(acc), mask=(t < T)[:, None])


@family
def causal_conv1d(data):
    x, w, out = data.normal(40, 32), data.normal(32, 4), torch.empty(40, 32)
    padded = torch.nn.functional.pad(x.double().T, (3, 0))
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(
        padded[None], w.double()[:, None], groups=32)[0].T)
    return (Problem().launch(_causal_conv, (3,), out, x, w, 40, D=32, WIDTH=4, B=16, num_warps=4)
            .close(out, want))


@triton.jit
def _max_pool(out, x, W, ROWS: tl.constexpr, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    r = tl.arange(0, ROWS)
    z = tl.load(x + (row * ROWS + r)[:, None] * W + at[None, :], mask=(at < W)[None, :],
                other=-float("inf"))
    z = tl.max(tl.reshape(tl.max(z, 0), (B // 2, 2)), 1)
    half = tl.arange(0, B // 2)
    tl.store(out + row * (W // 2) + half, z, mask=half < W // 2)


@family
def max_pool(data):
    x, out = data.normal(8, 100), torch.empty(4, 50)
    return (Problem().launch(_max_pool, (4,), out, x, 100, ROWS=2, B=128, num_warps=4)
            .equal(out, torch.nn.functional.max_pool2d(x[None], 2)[0]))


@triton.jit
def _flip(out, x, n, B: tl.constexpr):
    at = tl.arange(0, B)
    z = tl.flip(tl.load(x + at), 0)
    tl.store(out + at, z)
    a, b = tl.split(tl.reshape(z, (B // 2, 2)))
    tl.store(out + B + tl.arange(0, B), tl.cat(a, b, can_reorder=False))


@family
def flip_and_split(data):
    x, out = data.integers(0, 1000, 128), torch.empty(2, 128, dtype=torch.int32)
    z = x.flip(0)
    return (Problem().launch(_flip, (1,), out, x, 128, B=128, num_warps=4)
            .equal(out, torch.stack([z, torch.cat([z[0::2], z[1::2]])])))


@triton.jit
def _adam(w, m, v, grad, n, rate, b1, b2, eps, decay, c1, c2, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    g, p = tl.load(grad + at, mask=inside), tl.load(w + at, mask=inside)
    a = b1 * tl.load(m + at, mask=inside) + (1 - b1) * g
    s = b2 * tl.load(v + at, mask=inside) + (1 - b2) * g * g
    p = p * (1 - rate * decay) - rate * (a / c1) / (tl.sqrt(s / c2) + eps)
    tl.store(w + at, p, mask=inside)
    tl.store(m + at, a, mask=inside)
    tl.store(v + at, s, mask=inside)


@family
def adamw(data):
    w, g = data.normal(300), data.normal(300)
    m, v = torch.zeros(300), torch.zeros(300)
    leaf = w.double().requires_grad_()
    leaf.grad = g.double()
    torch.optim.AdamW([leaf], lr=0.1, weight_decay=0.01).step()
    return (Problem().launch(_adam, (3,), w, m, v, g, 300, 0.1, 0.9, 0.999, 1e-8, 0.01, 0.1, 0.001,
                             B=128, num_warps=4).close(w, leaf.detach(), 1e-4))


@triton.jit
def _interpolate(out, x, H, W, scale, B: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, B)
    y, z = (row + 0.5) * scale - 0.5, (at + 0.5) * scale - 0.5
    y, z = tl.maximum(y, 0.0), tl.maximum(z, 0.0)
    top, left = y.to(tl.int32), z.to(tl.int32)
    bottom, right = tl.minimum(top + 1, H - 1), tl.minimum(left + 1, W - 1)
    down, along = y - top, z - left
    inside = at < 2 * W
    upper = tl.load(x + top * W + left, mask=inside) * (1 - along) + tl.load(
        x + top * W + right, mask=inside) * along
    lower = tl.load(x + bottom * W + left, mask=inside) * (1 - along) + tl.load(
        x + bottom * W + right, mask=inside) * along
    tl.store(out + row * 2 * W + at, upper * (1 - down) + lower * down, mask=inside)


@family
def bilinear_interpolation(data):
    x, out = data.normal(6, 40), torch.empty(12, 80)
    want = torch.nn.functional.interpolate(x.double()[None, None], scale_factor=2, mode="bilinear")
    return (Problem().launch(_interpolate, (12,), out, x, 6, 40, 0.5, B=128, num_warps=2)
            .close(out, want[0, 0]))


@triton.jit
def _assembly(out, x, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    z = tl.load(x + at, mask=at < n, other=0)
    bits = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [z], dtype=tl.int32, is_pure=True,
                                     pack=1)
    tl.device_assert(bits <= 32, "more bits than a word has")
    tl.store(out + at, bits + libdevice.clz(z), mask=at < n)


@family
def inline_assembly(data):
    x, out = data.integers(0, 2**31 - 1, 200), torch.empty(200, dtype=torch.int32)
    want = torch.tensor([v.bit_count() + 32 - v.bit_length() for v in x.tolist()])
    return (Problem().launch(_assembly, (2,), out, x, 200, B=128, num_warps=4, debug=True)
            .equal(out, want))
