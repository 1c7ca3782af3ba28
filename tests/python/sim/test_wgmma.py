"""Layouts of wgmma: fragments, shared memory descriptors, swizzles.

Offsets follow the PTX ISA's "Shared Memory Matrix Layout" and the canonical
layouts of CUTLASS's GMMA descriptors, in 16-byte units:

  K-major   none ((8,n),2):((1,SBO),LBO)   128B ((8,n),2):((8,SBO),1)
  MN-major  none ((1,n),(8,k)):((X,SBO),(1,LBO))
            128B ((8,n),(8,k)):((1,LBO),(8,SBO))

and the same with 4 or 2 in place of 8 for 64B and 32B. A swizzle of 2^b chunks
flips address bits 4..4+b with bits 7..7+b.
"""

import numpy as np
import pytest
from corpus_matrices import bf16, e4m3
from ptxlib import entry
from test_fragments import F16, F32, S8, U8, a_m16k8_tf32, a_m16k16, a_m16k32_8bit, e5m2, pack

from moe_mlir import sim

THREADS = np.arange(128)
WARP, GROUP, IN_GROUP = THREADS // 32, THREADS % 32 // 4, THREADS % 4
SWIZZLE_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
IMAGE = 16384  # bytes of shared memory an operand
SWIZZLE_CODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def d_m64(i):
    return WARP * 16 + GROUP + 8 * (i // 2 % 2), 8 * (i // 4) + (
        IN_GROUP * 2 + i % 2)


def swizzled(offset, swizzle):
    chunks = SWIZZLE_BYTES[swizzle] // 16
    return offset ^ ((offset >> 7 & (chunks - 1)) << 4)


def k_major(mn, k_byte, swizzle, leading, stride):
    """Byte offset of a row's byte, before the swizzle."""
    if swizzle == "none":
        return (mn // 8 * stride + k_byte // 16 * leading + mn % 8 * 16 +
                k_byte % 16)
    return mn // 8 * stride + mn % 8 * SWIZZLE_BYTES[swizzle] + k_byte


def mn_major(mn, k, swizzle, leading, stride):
    """The same for 16-bit elements that run along M or N."""
    chunk = mn // 8
    if swizzle == "none":
        return chunk * stride + k % 8 * 16 + k // 8 * leading + mn % 8 * 2
    chunks = SWIZZLE_BYTES[swizzle] // 16
    return (chunk % chunks * 16 + chunk // chunks * leading +
            k % 8 * SWIZZLE_BYTES[swizzle] + k // 8 * stride + mn % 8 * 2)


def image(matrix, swizzle, transposed, leading, stride, first=0):
    """The bytes of an operand (rows M or N, columns K) in shared memory."""
    rows, cols = matrix.shape
    size = matrix.itemsize
    memory = np.full(IMAGE, 0x3C, np.uint8)
    mn, k = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    for byte in range(size):
        if transposed:
            offset = mn_major(mn, k, swizzle, leading, stride) + byte
        else:
            offset = k_major(mn, k * size + byte, swizzle, leading, stride)
        data = matrix.view(np.uint8).reshape(rows, cols, size)[:, :, byte]
        memory[swizzled(first + offset, swizzle)] = data
    return memory


def run_wgmma(instruction, tail, n, a, b, c, descriptors, out_registers):
    """`a` is a memory image or registers (128, 4); descriptors without their
    addresses; `c` and the result are registers (128, out_registers)."""
    from_registers = a.ndim == 2
    d = np.zeros_like(c)
    names = [f"d{i}" for i in range(out_registers)]
    registers = {r: "b64" for r in ("at", "da", "db", "x")}
    registers |= {r: "b32" for r in ("t", "to", "v", "a0", "a1", "a2", "a3")}
    registers |= {r: "b32" for r in names} | {"p": "pred"}
    body = ["mov.u32 t, %tid.x;"]

    def to_shared(param, variable):
        body.extend([
            f"ld.param.u64 at, [{param}];", "mul.wide.u32 x, t, 4;",
            "add.u64 at, at, x;", f"mov.u32 to, {variable};",
            "{ .reg .b32 o; shl.b32 o, t, 2; add.u32 to, to, o; }"])
        for i in range(IMAGE // 512):
            body.append(f"ld.global.b32 v, [at+{512 * i}];")
            body.append(f"st.shared.b32 [to+{512 * i}], v;")

    def describe(register, variable, value):
        body.extend([f"mov.u32 to, {variable};", "shr.u32 to, to, 4;",
                     f"cvt.u64.u32 {register}, to;",
                     f"add.u64 {register}, {register}, {value:#x};"])

    if from_registers:
        body += ["ld.param.u64 at, [pa];", "mul.wide.u32 x, t, 16;",
                 "add.u64 at, at, x;"]
        body += [f"ld.global.b32 a{i}, [at+{4 * i}];" for i in range(4)]
    else:
        to_shared("pa", "tile_a")
        describe("da", "tile_a", descriptors[0])
    to_shared("pb", "tile_b")
    describe("db", "tile_b", descriptors[1])
    body += ["ld.param.u64 at, [pc];", f"mul.wide.u32 x, t, {4 * len(names)};",
             "add.u64 at, at, x;"]
    body += [f"ld.global.b32 {r}, [at+{4 * i}];" for i, r in enumerate(names)]
    operand = "{a0, a1, a2, a3}" if from_registers else "da"
    body += [
        "fence.proxy.async;", "bar.sync 0;", "setp.eq.u32 p, 0, 0;",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n{n}{instruction} "
        f"{{{', '.join(names)}}}, {operand}, db, {tail};",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        "ld.param.u64 at, [pd];", "add.u64 at, at, x;"]
    body += [f"st.global.b32 [at+{4 * i}], {r};" for i, r in enumerate(names)]
    shared = (f".shared .align 1024 .b8 tile_a[{IMAGE}];\n"
              f".shared .align 1024 .b8 tile_b[{IMAGE}];")
    text = entry({p: "u64" for p in ("pa", "pb", "pc", "pd")}, registers,
                 "\n".join(body), shared=shared)
    report = sim.launch(text, "k", 1, 128, [a, b, c, d])
    assert report.ok, str(report)
    return d


def strides(swizzle, transposed, rows):
    """(leading, stride) in bytes of a densely packed operand."""
    if not transposed:
        if swizzle == "none":
            return 128, 256  # two core matrices of 128 bytes a row group
        return 16, 8 * SWIZZLE_BYTES[swizzle]  # leading is not used
    if swizzle == "none":
        return rows // 8 * 128, 128  # along K, along M or N
    return 2 * 8 * SWIZZLE_BYTES[swizzle], 8 * SWIZZLE_BYTES[swizzle]


def descriptor(swizzle, leading, stride, first=0):
    return (first >> 4) + (leading >> 4 << 16) + (stride >> 4 << 32) + (
        SWIZZLE_CODE[swizzle] << 62)


def unpack(registers, n, dtype):
    elements = registers.view(dtype)
    d = np.zeros((64, n), dtype)
    for i in range(elements.shape[1]):
        d[d_m64(i)] = elements[:, i]
    return d


def check(types, k, n, encode_a, encode_b, accumulator, *, swizzles,
          transposed=(False, False), from_registers=None, tail="p, 1, 1",
          expected=lambda a, b, c: a @ b.T + c, first=0):
    rng = np.random.default_rng(n + k)
    a = rng.integers(0 if encode_a is U8 else -4, 5, (64, k))
    b = rng.integers(0 if encode_b is U8 else -4, 5, (n, k))
    c = rng.integers(-50, 50, (64, n))
    count = n // 2 * np.dtype(accumulator).itemsize // 4
    elements = [c[d_m64(i)] for i in range(n // 2)]
    fragment = np.stack(elements, 1).astype(accumulator).view(np.uint32)
    descriptors, images = [], []
    for matrix, encode, swizzle, turned in zip(
            (a, b), (encode_a, encode_b), swizzles, transposed):
        leading, stride = strides(swizzle, turned, len(matrix))
        descriptors.append(descriptor(swizzle, leading, stride, first))
        images.append(image(encode(matrix), swizzle, turned, leading, stride,
                            first))
    if from_registers:
        layout, per_lane = from_registers
        warps = [pack(encode_a(a[16 * w: 16 * w + 16]), layout, per_lane)
                 for w in range(4)]
        images[0] = np.concatenate(warps)
    d = run_wgmma(f"k{k}.{types}", tail, n, *images, fragment, descriptors,
                  count)
    assert np.array_equal(unpack(d, n, accumulator), expected(a, b, c))


HALF_TAIL = "p, 1, 1, {}, {}"


@pytest.mark.parametrize("n", [8, 16, 64, 128])
@pytest.mark.parametrize("swizzle", SWIZZLE_BYTES)
def test_k_major(n, swizzle):
    check("f32.f16.f16", 16, n, F16, F16, np.float32,
          swizzles=(swizzle, swizzle), tail=HALF_TAIL.format(0, 0))


@pytest.mark.parametrize("n", [8, 24, 40, 64])
@pytest.mark.parametrize("swizzle", SWIZZLE_BYTES)
def test_mn_major(n, swizzle):
    """Of the last swizzled rows, N may take a part."""
    check("f32.bf16.bf16", 16, n, bf16, bf16, np.float32,
          swizzles=(swizzle, swizzle), transposed=(True, True),
          tail=HALF_TAIL.format(1, 1))


def test_operands_with_different_layouts():
    check("f32.f16.f16", 16, 64, F16, F16, np.float32,
          swizzles=("64B", "128B"), transposed=(False, True),
          tail=HALF_TAIL.format(0, 1))


@pytest.mark.parametrize("first", [32, 64, 96])
def test_start_inside_a_swizzled_row(first):
    """The next steps of K begin inside the atom: the address is swizzled."""
    check("f32.f16.f16", 16, 16, F16, F16, np.float32,
          swizzles=("128B", "128B"), tail=HALF_TAIL.format(0, 0), first=first)


TYPES = [
    ("f16.f16.f16", 16, F16, F16, np.float16, HALF_TAIL.format(0, 0)),
    ("f32.bf16.bf16", 16, bf16, bf16, np.float32, HALF_TAIL.format(0, 0)),
    ("f32.tf32.tf32", 8, F32, F32, np.float32, "p, 1, 1"),
    ("f32.e4m3.e4m3", 32, e4m3, e4m3, np.float32, "p, 1, 1"),
    ("f32.e5m2.e4m3", 32, e5m2, e4m3, np.float32, "p, 1, 1"),
    ("f16.e4m3.e5m2", 32, e4m3, e5m2, np.float16, "p, 1, 1"),
    ("s32.s8.s8", 32, S8, S8, np.int32, "p"),
    ("s32.u8.u8", 32, U8, U8, np.int32, "p"),
]


@pytest.mark.parametrize("types, k, encode_a, encode_b, accumulator, tail",
                         TYPES, ids=[t[0] for t in TYPES])
def test_types(types, k, encode_a, encode_b, accumulator, tail):
    check(types, k, 16, encode_a, encode_b, accumulator,
          swizzles=("none", "32B"), tail=tail)


@pytest.mark.parametrize("types, k, encode, layout, tail", [
    ("f32.f16.f16", 16, F16, (a_m16k16, 8), "p, 1, 1, 0"),
    ("f32.tf32.tf32", 8, F32, (a_m16k8_tf32, 4), "p, 1, 1"),
    ("f32.e4m3.e4m3", 32, e4m3, (a_m16k32_8bit, 16), "p, 1, 1"),
    ("s32.s8.s8", 32, S8, (a_m16k32_8bit, 16), "p"),
], ids=["f16", "tf32", "e4m3", "s8"])
def test_a_from_registers(types, k, encode, layout, tail):
    accumulator = np.int32 if types.startswith("s32") else np.float32
    check(types, k, 32, encode, encode, accumulator,
          swizzles=("none", "128B"), from_registers=layout, tail=tail)


@pytest.mark.parametrize("tail, expected", [
    ("p, -1, 1, 0, 0", lambda a, b, c: c - a @ b.T),
    ("p, 1, -1, 0, 0", lambda a, b, c: c - a @ b.T),
    ("p, -1, -1, 0, 0", lambda a, b, c: c + a @ b.T),
    ("0, 1, 1, 0, 0", lambda a, b, c: a @ b.T),
], ids=["negative-a", "negative-b", "negative-both", "scale-d-0"])
def test_scales(tail, expected):
    check("f32.f16.f16", 16, 8, F16, F16, np.float32,
          swizzles=("none", "none"), tail=tail, expected=expected)
