"""Register and memory layouts of the matrix instructions.

The formulas are those of the PTX ISA's tables (chapter "Warp level matrix
instructions" and "Asynchronous warpgroup level matrix instructions"): the row
and column of element i of a lane. Random integers make every product exact, so
one misplaced element shows.
"""

import numpy as np
import pytest
from corpus_matrices import bf16, e4m3
from ptxlib import entry

from moe_mlir import sim

LANES = np.arange(32)
GROUP, IN_GROUP = LANES // 4, LANES % 4


def e5m2(x):
    """The bits of integers in [-4, 4] as e5m2: the upper half of binary16."""
    return (np.asarray(x, np.float16).view(np.uint16) >> 8).astype(np.uint8)


def as_is(dtype):
    return lambda x: np.asarray(x).astype(dtype)


# --- mma.sync: element i of a lane -> (row, column) ---------------------------


def a_m16k16(i):
    return GROUP + 8 * (i // 2 % 2), IN_GROUP * 2 + i % 2 + 8 * (i // 4)


def b_k16n8(i):
    return IN_GROUP * 2 + i % 2 + 8 * (i // 2), GROUP


def a_m16k8(i):
    return GROUP + 8 * (i // 2), IN_GROUP * 2 + i % 2


def b_k8n8(i):
    return IN_GROUP * 2 + i, GROUP


def a_m16k4_tf32(i):
    return GROUP + 8 * i, IN_GROUP


def b_k4n8_tf32(i):
    return IN_GROUP, GROUP


def a_m16k8_tf32(i):
    return GROUP + 8 * (i % 2), IN_GROUP + 4 * (i // 2)


def b_k8n8_tf32(i):
    return IN_GROUP + 4 * i, GROUP


def a_m16k16_8bit(i):
    return GROUP + 8 * (i // 4), IN_GROUP * 4 + i % 4


def b_k16n8_8bit(i):
    return IN_GROUP * 4 + i, GROUP


def a_m16k32_8bit(i):
    return GROUP + 8 * (i // 4 % 2), IN_GROUP * 4 + i % 4 + 16 * (i // 8)


def b_k32n8_8bit(i):
    return IN_GROUP * 4 + i % 4 + 16 * (i // 4), GROUP


def c_m16n8(i):
    return GROUP + 8 * (i // 2), IN_GROUP * 2 + i % 2


def pack(matrix, layout, count):
    """The 32-bit registers of each lane: (32, registers) of uint32."""
    elements = np.stack([matrix[layout(i)] for i in range(count)], 1)
    return np.ascontiguousarray(elements).view(np.uint32)


def unpack(registers, layout, shape, dtype):
    elements = registers.view(dtype)
    matrix = np.zeros(shape, dtype)
    for i in range(elements.shape[1]):
        matrix[layout(i)] = elements[:, i]
    return matrix


def run_mma(instruction, a, b, c, **options):
    """One warp: fragments (32, registers) in, the result's registers out."""
    d = np.zeros_like(c)
    registers = {"at": "b64", "lane": "b32", "far": "b64"}
    body = ["mov.u32 lane, %laneid;"]
    lists = {}
    for name, fragment in (("a", a), ("b", b), ("c", c), ("d", d)):
        count = fragment.shape[1]
        names = [f"{name}{i}" for i in range(count)]
        registers |= {n: "b32" for n in names}
        lists[name] = "{" + ", ".join(names) + "}"

    def each(name, statement):
        count = len(lists[name].split(","))
        body.append(f"ld.param.u64 at, [p{name}];")
        body.append(f"mul.wide.u32 far, lane, {4 * count};")
        body.append("add.u64 at, at, far;")
        body.extend(statement.format(i=i, at=4 * i) for i in range(count))

    for name in "abc":
        each(name, "ld.global.b32 " + name + "{i}, [at+{at}];")
    body.append(f"{instruction} {lists['d']}, {lists['a']}, {lists['b']}, "
                f"{lists['c']};")
    each("d", "st.global.b32 [at+{at}], d{i};")
    text = entry({f"p{n}": "u64" for n in "abcd"}, registers, "\n".join(body))
    report = sim.launch(text, "k", 1, 32, [a, b, c, d], **options)
    assert report.ok, str(report)
    return d


HALF = dict(layouts=(a_m16k16, b_k16n8), counts=(8, 4), k=16)
HALF8 = dict(layouts=(a_m16k8, b_k8n8), counts=(4, 2), k=8)
TF32_4 = dict(layouts=(a_m16k4_tf32, b_k4n8_tf32), counts=(2, 1), k=4)
TF32_8 = dict(layouts=(a_m16k8_tf32, b_k8n8_tf32), counts=(4, 2), k=8)
BYTE16 = dict(layouts=(a_m16k16_8bit, b_k16n8_8bit), counts=(8, 4), k=16)
BYTE32 = dict(layouts=(a_m16k32_8bit, b_k32n8_8bit), counts=(16, 8), k=32)
F16, F32 = as_is(np.float16), as_is(np.float32)
S8, U8 = as_is(np.int8), as_is(np.uint8)

# (types, shape, encoding of A, of B, accumulator)
MMA = [
    ("f32.f16.f16.f32", HALF, F16, F16, np.float32),
    ("f16.f16.f16.f16", HALF, F16, F16, np.float16),
    ("f32.bf16.bf16.f32", HALF, bf16, bf16, np.float32),
    ("f32.f16.f16.f32", HALF8, F16, F16, np.float32),
    ("f16.f16.f16.f16", HALF8, F16, F16, np.float16),
    ("f32.bf16.bf16.f32", HALF8, bf16, bf16, np.float32),
    ("f32.tf32.tf32.f32", TF32_4, F32, F32, np.float32),
    ("f32.tf32.tf32.f32", TF32_8, F32, F32, np.float32),
    ("s32.s8.s8.s32", BYTE16, S8, S8, np.int32),
    ("s32.u8.u8.s32", BYTE16, U8, U8, np.int32),
    ("s32.s8.s8.s32", BYTE32, S8, S8, np.int32),
    ("s32.u8.s8.s32", BYTE32, U8, S8, np.int32),
    ("s32.s8.u8.s32", BYTE32, S8, U8, np.int32),
    ("f32.e4m3.e4m3.f32", BYTE32, e4m3, e4m3, np.float32),
    ("f32.e5m2.e4m3.f32", BYTE32, e5m2, e4m3, np.float32),
    ("f32.e4m3.e5m2.f32", BYTE32, e4m3, e5m2, np.float32),
    ("f32.e5m2.e5m2.f32", BYTE32, e5m2, e5m2, np.float32),
]


@pytest.mark.parametrize(
    "types, shape, encode_a, encode_b, accumulator", MMA,
    ids=[f"m16n8k{m[1]['k']}.{m[0]}" for m in MMA])
def test_mma(types, shape, encode_a, encode_b, accumulator):
    rng = np.random.default_rng(1)
    k = shape["k"]
    low_a = 0 if encode_a is U8 else -4
    low_b = 0 if encode_b is U8 else -4
    a = rng.integers(low_a, 5, (16, k))
    b = rng.integers(low_b, 5, (k, 8))
    c = rng.integers(-50, 50, (16, 8)).astype(accumulator)
    instruction = f"mma.sync.aligned.m16n8k{k}.row.col.{types}"
    (layout_a, layout_b), (count_a, count_b) = shape["layouts"], shape["counts"]
    d = run_mma(instruction, pack(encode_a(a), layout_a, count_a),
                pack(encode_b(b), layout_b, count_b), pack(c, c_m16n8, 4))
    assert np.array_equal(unpack(d, c_m16n8, (16, 8), accumulator), a @ b + c)


def test_extreme_bytes():
    """Sums of the largest products, and both encodings of -128 and 255."""
    a, b = np.full((16, 32), 255), np.full((32, 8), -128)
    zero = np.zeros((32, 4), np.uint32)
    d = run_mma("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32",
                pack(U8(a), a_m16k32_8bit, 16), pack(S8(b), b_k32n8_8bit, 8),
                zero)
    assert (d.view(np.int32) == 32 * 255 * -128).all()


def test_satfinite_clamps_the_integer_sum():
    a, b = np.full((16, 32), 127), np.full((32, 8), 127)
    c = np.full((32, 4), 2**31 - 10, np.int32).view(np.uint32)
    name = "mma.sync.aligned.m16n8k32.row.col{}.s32.s8.s8.s32"
    fragments = pack(S8(a), a_m16k32_8bit, 16), pack(S8(b), b_k32n8_8bit, 8)
    clamped = run_mma(name.format(".satfinite"), *fragments, c)
    wrapped = run_mma(name.format(""), *fragments, c)
    assert (clamped.view(np.int32) == 2**31 - 1).all()
    assert (wrapped.view(np.int32) == 2**31 - 10 + 32 * 127**2 - 2**32).all()


def test_tf32_ignores_the_low_mantissa_bits():
    a = np.full((16, 8), 1 + 2.0**-12, np.float32)  # below tf32's 10 bits
    b = np.ones((8, 8), np.float32)
    zero = np.zeros((32, 4), np.uint32)
    d = run_mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
                pack(a, a_m16k8_tf32, 4), pack(b, b_k8n8_tf32, 2), zero)
    assert (d.view(np.float32) == 8).all()


@pytest.mark.parametrize("numerics", ["exact", "tensor_core", "perturbed"])
def test_products_are_exact_and_sums_in_f32(numerics):
    """1 + 2^-20 is no f16, but 1 * 1 + 2^-10 * 2^-10 must keep both terms."""
    a = np.zeros((16, 16), np.float16)
    b = np.zeros((16, 8), np.float16)
    a[:, 0], b[0], a[:, 9], b[9] = 1, 1, 2.0**-10, 2.0**-10
    zero = np.zeros((32, 4), np.uint32)
    d = run_mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
                pack(a, a_m16k16, 8), pack(b, b_k16n8, 4), zero,
                numerics=numerics)
    assert (d.view(np.float32) == np.float32(1 + 2.0**-20)).all()


# --- ldmatrix, stmatrix, movmatrix --------------------------------------------

SHARED = ".shared .align 16 .b8 tile[1024];"


def fill_tile(source="pin", words=8):
    """Thread t copies 4-byte words t, t + 32... of the input to the tile."""
    lines = ["mov.u32 lane, %laneid;", f"ld.param.u64 at, [{source}];",
             "mul.wide.u32 far, lane, 4;", "add.u64 at, at, far;",
             "mov.u32 to, tile;", "shl.b32 t, lane, 2;", "add.u32 to, to, t;"]
    for i in range(words):
        lines += [f"ld.global.b32 t, [at+{128 * i}];",
                  f"st.shared.b32 [to+{128 * i}], t;"]
    return lines


REGISTERS = {"lane": "b32", "at": "b64", "far": "b64", "to": "b32",
             "t": "b32"} | {f"r{i}": "b32" for i in range(4)}


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    rng = np.random.default_rng(2)
    tile = rng.integers(0, 2**16, (64, 8), dtype=np.uint16)
    rows = rng.permutation(64)[:32].astype(np.uint32)  # lane -> row it names
    out = np.zeros((32, 4), np.uint32)
    names = ", ".join(f"r{i}" for i in range(count))
    body = fill_tile() + [
        "ld.param.u64 at, [prows];", "add.u64 at, at, far;",
        "ld.global.b32 t, [at];", "shl.b32 t, t, 4;", "mov.u32 to, tile;",
        "add.u32 to, to, t;", "bar.warp.sync -1;",
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16 "
        f"{{{names}}}, [to];",
        "ld.param.u64 at, [pout];", "shl.b64 far, far, 2;",
        "add.u64 at, at, far;",
    ] + [f"st.global.b32 [at+{4 * i}], r{i};" for i in range(count)]
    text = entry({"pin": "u64", "prows": "u64", "pout": "u64"}, REGISTERS,
                 "\n".join(body), shared=SHARED)
    report = sim.launch(text, "k", 1, 32, [tile, rows, out])
    assert report.ok, str(report)
    for matrix in range(count):
        m = tile[rows[8 * matrix: 8 * matrix + 8]]
        m = m.T if trans else m
        expected = np.stack([m[GROUP, IN_GROUP * 2], m[GROUP, IN_GROUP * 2 + 1]
                             ], 1)
        halves = np.ascontiguousarray(out[:, matrix: matrix + 1])
        assert np.array_equal(halves.view(np.uint16), expected), matrix


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, trans):
    rng = np.random.default_rng(3)
    registers = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    rows = rng.permutation(64)[:32].astype(np.uint32)
    out = np.zeros((64, 8), np.uint16)
    names = ", ".join(f"r{i}" for i in range(count))
    body = ["mov.u32 lane, %laneid;", "mul.wide.u32 far, lane, 4;",
            "mov.u32 to, tile;", "shl.b32 t, lane, 2;", "add.u32 to, to, t;",
            "mov.u32 t, 0;"]
    body += [f"st.shared.b32 [to+{128 * i}], t;" for i in range(8)]
    body += ["ld.param.u64 at, [prows];", "add.u64 at, at, far;",
             "ld.global.b32 t, [at];", "shl.b32 t, t, 4;",
             "mov.u32 to, tile;", "add.u32 to, to, t;",
             "ld.param.u64 at, [pin];", "shl.b64 far, far, 2;",
             "add.u64 at, at, far;"]
    body += [f"ld.global.b32 r{i}, [at+{4 * i}];" for i in range(4)]
    body += ["bar.warp.sync -1;",
             f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}"
             f".shared.b16 [to], {{{names}}};",
             "bar.warp.sync -1;", "ld.param.u64 at, [pout];",
             "shr.u64 far, far, 2;", "add.u64 at, at, far;",
             "mov.u32 to, tile;", "shl.b32 t, lane, 2;", "add.u32 to, to, t;"]
    for i in range(8):
        body += [f"ld.shared.b32 t, [to+{128 * i}];",
                 f"st.global.b32 [at+{128 * i}], t;"]
    text = entry({"pin": "u64", "prows": "u64", "pout": "u64"}, REGISTERS,
                 "\n".join(body), shared=SHARED)
    report = sim.launch(text, "k", 1, 32, [registers, rows, out])
    assert report.ok, str(report)
    expected = np.zeros((64, 8), np.uint16)
    halves = registers.view(np.uint16).reshape(32, 4, 2)
    for matrix in range(count):
        m = np.zeros((8, 8), np.uint16)
        for j in (0, 1):
            m[GROUP, IN_GROUP * 2 + j] = halves[:, matrix, j]
        expected[rows[8 * matrix: 8 * matrix + 8]] = m.T if trans else m
    assert np.array_equal(out, expected)


def test_movmatrix():
    rng = np.random.default_rng(4)
    matrix = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    source = np.stack([matrix[GROUP, IN_GROUP * 2 + j] for j in (0, 1)], 1)
    source = np.ascontiguousarray(source).view(np.uint32)
    out = np.zeros((32, 1), np.uint32)
    body = ["mov.u32 lane, %laneid;", "mul.wide.u32 far, lane, 4;",
            "ld.param.u64 at, [pin];", "add.u64 at, at, far;",
            "ld.global.b32 r0, [at];",
            "movmatrix.sync.aligned.m8n8.trans.b16 r1, r0;",
            "ld.param.u64 at, [pout];", "add.u64 at, at, far;",
            "st.global.b32 [at], r1;"]
    text = entry({"pin": "u64", "pout": "u64"}, REGISTERS, "\n".join(body))
    report = sim.launch(text, "k", 1, 32, [source, out])
    assert report.ok, str(report)
    expected = np.stack([matrix.T[GROUP, IN_GROUP * 2 + j] for j in (0, 1)], 1)
    assert np.array_equal(out.view(np.uint16), expected)
