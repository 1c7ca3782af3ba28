"""Integer and bit instructions against numpy and plain Python."""

import numpy as np
import pytest
from ptxlib import evaluate, fill, pairs

U32 = [0, 1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 0xFF, 0x100, 0x7FFF, 0x8000,
       0xFFFF, 0x10000, 0x12345678, 0x7FFFFFFF, 0x80000000, 0x80000001,
       0xDEADBEEF, 0xFFFFFFFE, 0xFFFFFFFF]
U64 = U32 + [1 << 32, 0x123456789ABCDEF0, (1 << 63) - 1, 1 << 63,
             (1 << 64) - 1, (1 << 64) - 1000003]


def values(width):
    return {16: sorted({v & 0xFFFF for v in U32}), 32: U32, 64: U64}[width]


def signed(v, width):
    return v - (1 << width) if v >> (width - 1) & 1 else v


def operands(kind):
    """Pairs of values as arrays of their bits, and as Python integers."""
    width = int(kind[1:])
    a, b = pairs(values(width), f"u{width // 8}")
    if kind[0] == "s":
        return a, b, [(signed(x, width), signed(y, width))
                      for x, y in zip(a.tolist(), b.tolist())]
    return a, b, list(zip(a.tolist(), b.tolist()))


def expect(results, width):
    return np.array([r % (1 << width) for r in results], f"u{width // 8}")


def truncated(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


BINARY = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, kind):
    width = int(kind[1:])
    a, b, integers = operands(kind)
    got = evaluate(f"{name}.{kind} $0, $1, $2;", a.dtype, a, b)
    want = [BINARY[name](x, y, width) for x, y in integers]
    assert np.array_equal(got, expect(want, width))


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_division_truncates(kind):
    width = int(kind[1:])
    a, b, integers = operands(kind)
    keep = np.array([y != 0 and not (x == -(1 << (width - 1)) and y == -1)
                     for x, y in integers])
    b = np.where(keep, b, 1).astype(b.dtype)
    pairs_ = [(x, y if k else 1) for (x, y), k in zip(integers, keep)]
    quotient = evaluate(f"div.{kind} $0, $1, $2;", a.dtype, a, b)
    rest = evaluate(f"rem.{kind} $0, $1, $2;", a.dtype, a, b)
    assert np.array_equal(
        quotient, expect([truncated(x, y) for x, y in pairs_], width))
    assert np.array_equal(
        rest, expect([x - truncated(x, y) * y for x, y in pairs_], width))


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_multiply(kind):
    width = int(kind[1:])
    a, b, integers = operands(kind)
    wide = f"u{width // 4}"
    c = np.arange(len(a)).astype(wide)
    got = evaluate(f"mul.wide.{kind} $0, $1, $2;", wide, a, b)
    assert np.array_equal(got, expect([x * y for x, y in integers], 2 * width))
    got = evaluate(f"mad.wide.{kind} $0, $1, $2, $3;", wide, a, b, c)
    want = [x * y + i for i, (x, y) in enumerate(integers)]
    assert np.array_equal(got, expect(want, 2 * width))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_multiply_add(kind, half):
    width = int(kind[1:])
    a, b, integers = operands(kind)
    c = b[::-1].copy()
    got = evaluate(f"mad.{half}.{kind} $0, $1, $2, $3;", a.dtype, a, b, c)
    shift = width if half == "hi" else 0
    want = [(x * y >> shift) + z for (x, y), z in zip(integers, c.tolist())]
    assert np.array_equal(got, expect(want, width))


@pytest.mark.parametrize("kind", ["s32", "s64", "s16"])
def test_abs_and_neg(kind):
    width = int(kind[1:])
    a = fill(values(width), f"u{width // 8}")
    integers = [signed(v, width) for v in a.tolist()]
    for name, f in (("abs", abs), ("neg", lambda v: -v)):
        got = evaluate(f"{name}.{kind} $0, $1;", a.dtype, a)
        assert np.array_equal(got, expect([f(v) for v in integers], width))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_logic(width):
    a, b = pairs(values(width), f"u{width // 8}")
    for name, f in (("and", np.bitwise_and), ("or", np.bitwise_or),
                    ("xor", np.bitwise_xor)):
        got = evaluate(f"{name}.b{width} $0, $1, $2;", a.dtype, a, b)
        assert np.array_equal(got, f(a, b)), name
    assert np.array_equal(evaluate(f"not.b{width} $0, $1;", a.dtype, a), ~a)
    got = evaluate(f"cnot.b{width} $0, $1;", a.dtype, a)
    assert np.array_equal(got, (a == 0).astype(a.dtype))


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_clamp_at_the_width(width):
    a, _ = pairs(values(width), f"u{width // 8}")
    amounts = [0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 0xFFFFFFFF]
    by = np.resize(np.array(amounts, np.uint32), len(a))
    cases = list(zip(a.tolist(), by.tolist()))
    left = evaluate(f"shl.b{width} $0, $1, $2;", a.dtype, a, by)
    right = evaluate(f"shr.u{width} $0, $1, $2;", a.dtype, a, by)
    arithmetic = evaluate(f"shr.s{width} $0, $1, $2;", a.dtype, a, by)
    by_most = [(v, min(n, width)) for v, n in cases]
    assert np.array_equal(left, expect([v << n for v, n in by_most], width))
    assert np.array_equal(right, expect([v >> n for v, n in by_most], width))
    assert np.array_equal(arithmetic, expect(
        [signed(v, width) >> n for v, n in by_most], width))


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shift(mode):
    a, b = pairs(U32, np.uint32)
    by = np.resize(np.array([0, 1, 7, 31, 32, 33, 100], np.uint32), len(a))
    shift = [n % 32 if mode == "wrap" else min(n, 32) for n in by.tolist()]
    both = [(y << 32) | x for x, y in zip(a.tolist(), b.tolist())]
    left = evaluate(f"shf.l.{mode}.b32 $0, $1, $2, $3;", np.uint32, a, b, by)
    right = evaluate(f"shf.r.{mode}.b32 $0, $1, $2, $3;", np.uint32, a, b, by)
    assert np.array_equal(left, expect(
        [(v << n) >> 32 for v, n in zip(both, shift)], 32))
    assert np.array_equal(right, expect(
        [v >> n for v, n in zip(both, shift)], 32))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind):
    width = int(kind[1:])
    a, _ = pairs(values(width), f"u{width // 8}")
    rng = np.random.default_rng(0)
    choices = np.array([0, 1, 3, 8, 16, 31, 32, 40, 63, 64, 200, 255])
    start = rng.choice(choices, len(a)).astype(np.uint32)
    length = rng.choice(choices, len(a)).astype(np.uint32)
    got = evaluate(f"bfe.{kind} $0, $1, $2, $3;", a.dtype, a, start, length)

    def field(v, pos, n):  # the PTX ISA's pseudo-code
        msb = width - 1
        if kind[0] == "u" or n == 0:
            sign = 0
        else:
            sign = v >> min(pos + n - 1, msb) & 1
        result = 0
        for i in range(width):
            if i < n and pos + i <= msb:
                result |= (v >> (pos + i) & 1) << i
            else:
                result |= sign << i
        return result

    want = [field(*x) for x in zip(a.tolist(), start.tolist(), length.tolist())]
    assert np.array_equal(got, np.array(want, a.dtype))


@pytest.mark.parametrize("width", [32, 64])
def test_bit_field_insert(width):
    a, b = pairs(values(width), f"u{width // 8}")
    rng = np.random.default_rng(0)
    choices = np.array([0, 1, 3, 8, 16, 31, 32, 40, 63, 64, 200, 255])
    start = rng.choice(choices, len(a)).astype(np.uint32)
    length = rng.choice(choices, len(a)).astype(np.uint32)
    got = evaluate(f"bfi.b{width} $0, $1, $2, $3, $4;", a.dtype, a, b, start,
                   length)

    def insert(x, y, pos, n):
        for i in range(n):
            if pos + i < width:
                y = y & ~(1 << (pos + i)) | (x >> i & 1) << (pos + i)
        return y

    want = [insert(*v) for v in zip(a.tolist(), b.tolist(), start.tolist(),
                                    length.tolist())]
    assert np.array_equal(got, np.array(want, a.dtype))


@pytest.mark.parametrize("width", [32, 64])
def test_counting_bits(width):
    a = fill(values(width), f"u{width // 8}")
    plain = a.tolist()
    assert np.array_equal(evaluate(f"popc.b{width} $0, $1;", np.uint32, a),
                          [v.bit_count() for v in plain])
    assert np.array_equal(evaluate(f"clz.b{width} $0, $1;", np.uint32, a),
                          [width - v.bit_length() for v in plain])
    assert np.array_equal(evaluate(f"brev.b{width} $0, $1;", a.dtype, a),
                          [int(f"{v:0{width}b}"[::-1], 2) for v in plain])


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfind(kind):
    width = int(kind[1:])
    a = fill(values(width), f"u{width // 8}")
    plain = a.tolist()
    if kind[0] == "s":  # the highest bit that differs from the sign
        plain = [~v % (1 << width) if v >> (width - 1) else v for v in plain]
    at = [v.bit_length() - 1 for v in plain]
    got = evaluate(f"bfind.{kind} $0, $1;", np.uint32, a)
    assert np.array_equal(got, expect(at, 32))
    got = evaluate(f"bfind.shiftamt.{kind} $0, $1;", np.uint32, a)
    want = [width - 1 - p if p >= 0 else -1 for p in at]
    assert np.array_equal(got, expect(want, 32))


def test_bit_mask():
    choices = np.array([0, 1, 5, 16, 30, 31, 32, 33, 255])
    a, b = (x.astype(np.uint32) for x in pairs(choices, np.uint32))
    clamp = evaluate("bmsk.clamp.b32 $0, $1, $2;", np.uint32, a, b)
    want = [((1 << min(n, 32)) - 1) << p if p < 32 else 0
            for p, n in zip(a.tolist(), b.tolist())]
    assert np.array_equal(clamp, expect(want, 32))
    wrap = evaluate("bmsk.wrap.b32 $0, $1, $2;", np.uint32, a, b)
    want = [((1 << n % 32) - 1) << p % 32
            for p, n in zip(a.tolist(), b.tolist())]
    assert np.array_equal(wrap, expect(want, 32))


def permuted(a, b, selector, mode):
    bytes_ = [(a | b << 32) >> 8 * i & 0xFF for i in range(8)]
    low = selector & 3
    picks = {
        "f4e": [low + i for i in range(4)],
        "b4e": [(low - i) % 8 for i in range(4)],
        "rc8": [low] * 4,
        "ecl": [max(low, i) for i in range(4)],
        "ecr": [min(low, i) for i in range(4)],
        "rc16": [(selector & 1) * 2 + i % 2 for i in range(4)],
    }
    if mode:
        return sum(bytes_[p] << 8 * i for i, p in enumerate(picks[mode]))
    result = 0
    for i in range(4):
        nibble = selector >> 4 * i
        byte = bytes_[nibble & 7]
        if nibble & 8:  # replicate the sign
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * i
    return result


@pytest.mark.parametrize("mode", ["", "f4e", "b4e", "rc8", "ecl", "ecr",
                                  "rc16"])
def test_prmt(mode):
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 2**32, (3, 256), dtype=np.uint32)
    suffix = f".{mode}" if mode else ""
    got = evaluate(f"prmt.b32{suffix} $0, $1, $2, $3;", np.uint32, a, b, c)
    want = [permuted(*v, mode) for v in zip(a.tolist(), b.tolist(),
                                            c.tolist())]
    assert np.array_equal(got, np.array(want, np.uint32))


def test_lop3_has_every_table():
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 2**32, (3, 32), dtype=np.uint32)
    for table in range(0, 256, 17):
        for extra in (0, 1, 0x78):
            lut = table ^ extra
            got = evaluate(f"lop3.b32 $0, $1, $2, $3, {lut:#x};", np.uint32, a,
                           b, c)
            want = np.zeros_like(a)
            for row in range(8):
                if lut >> row & 1:
                    want |= ((a if row & 4 else ~a) & (b if row & 2 else ~b) &
                             (c if row & 1 else ~c))
            assert np.array_equal(got, want), hex(lut)


def test_sad_and_selections():
    a, b, integers = operands("s32")
    c = b[::-1].copy()
    got = evaluate("sad.s32 $0, $1, $2, $3;", np.uint32, a, b, c)
    want = [abs(x - y) + z for (x, y), z in zip(integers, c.tolist())]
    assert np.array_equal(got, expect(want, 32))
    got = evaluate("setp.lt.s32 p, $1, $2; selp.b32 $0, $1, $2, p;", np.uint32,
                   a, b)
    assert np.array_equal(got, expect([min(p) for p in integers], 32))
    got = evaluate("slct.u32.s32 $0, $1, $2, $3;", np.uint32, a, b, c)
    assert np.array_equal(got, np.where(c.view(np.int32) >= 0, a, b))


COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
           "ge": ">="}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_comparisons(kind):
    a, b, integers = operands(kind)
    for name, symbol in COMPARE.items():
        got = evaluate(f"setp.{name}.{kind} p, $1, $2; selp.u32 $0, 1, 0, p;",
                       np.uint32, a, b)
        want = [eval(f"{x} {symbol} {y}") for x, y in integers]
        assert np.array_equal(got, want), name
    if kind[0] == "u":
        for name, like in (("lo", "lt"), ("ls", "le"), ("hi", "gt"),
                           ("hs", "ge")):
            one, other = (
                evaluate(f"setp.{c}.{kind} p, $1, $2; selp.u32 $0, 1, 0, p;",
                         np.uint32, a, b) for c in (name, like))
            assert np.array_equal(one, other), name


def test_comparison_joins_a_predicate():
    a, b, integers = operands("s32")
    for op, f in (("and", lambda x, y: x & y), ("or", lambda x, y: x | y),
                  ("xor", lambda x, y: x ^ y)):
        both, inverse = evaluate(
            f"setp.gt.s32 q, $1, 5; setp.lt.{op}.s32 p|q, $1, $2, q;"
            "selp.u32 $0, 1, 0, p; selp.u32 $01, 1, 0, q;",
            (np.uint32, np.uint32), a, b)
        less = np.array([x < y for x, y in integers])
        more = np.array([x > 5 for x, _ in integers])
        assert np.array_equal(both, f(less, more)), op
        assert np.array_equal(inverse, f(~less, more)), op
    got = evaluate("setp.lt.s32 p, $1, $2; selp.u32 $0, 1, 0, p;"
                   "@!p mov.u32 $0, 7;", np.uint32, a, b)
    assert np.array_equal(got, np.where([x < y for x, y in integers], 1, 7))


def test_set_writes_all_ones():
    a, b, integers = operands("s32")
    less = np.array([x < y for x, y in integers])
    got = evaluate("set.lt.u32.s32 $0, $1, $2;", np.uint32, a, b)
    assert np.array_equal(got, np.where(less, 0xFFFFFFFF, 0))
    got = evaluate("set.lt.f32.s32 $0, $1, $2;", np.float32, a, b)
    assert np.array_equal(got, np.where(less, 1.0, 0.0))


INTEGERS = ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"]


def low_bits(value, kind):
    value %= 1 << int(kind[1:])
    return signed(value, int(kind[1:])) if kind[0] == "s" else value


def limits(kind):
    width = int(kind[1:])
    if kind[0] == "u":
        return 0, (1 << width) - 1
    return -(1 << (width - 1)), (1 << (width - 1)) - 1


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_conversions(source, to):
    width, wide = int(source[1:]), max(16, int(to[1:]))
    a = fill([v % (1 << width) for v in U64], f"u{width // 8}")
    plain = [low_bits(v, source) for v in a.tolist()]
    got = evaluate(f"cvt.{to}.{source} $0, $1;", f"u{wide // 8}", a)
    want = [low_bits(v, to) for v in plain]  # extended to the register
    assert np.array_equal(got, expect(want, wide))
    (low, high), (from_low, from_high) = limits(to), limits(source)
    if low <= from_low and from_high <= high:
        return  # every value fits: .sat is not legal
    got = evaluate(f"cvt.sat.{to}.{source} $0, $1;", f"u{wide // 8}", a)
    want = [min(max(v, low), high) for v in plain]
    assert np.array_equal(got, expect(want, wide))


def test_moves_pack_and_unpack():
    a, b = pairs(U32, np.uint32)
    got = evaluate("mov.b64 $0, {$1, $2};", np.uint64, a, b)
    wide = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    assert np.array_equal(got, wide)
    low, high = evaluate("mov.b64 {$0, $01}, $1;", (np.uint32, np.uint32),
                         wide)
    assert np.array_equal(low, a) and np.array_equal(high, b)
    low, high = evaluate("mov.b32 {$0, $01}, $1;", (np.uint16, np.uint16), a)
    assert np.array_equal(low, a & 0xFFFF) and np.array_equal(high, a >> 16)
    got = evaluate("{ .reg .b16 l, h; mov.b32 {l, h}, $1;"
                   " mov.b32 $0, {h, l}; }", np.uint32, a)
    assert np.array_equal(got, a << 16 | a >> 16)


@pytest.mark.parametrize("direction", ["add", "sub"])
def test_carry_chains(direction):
    a, b = pairs(U64, np.uint64)
    got = evaluate(
        "{ .reg .b32 al, ah, bl, bh, l, h;"
        "mov.b64 {al, ah}, $1; mov.b64 {bl, bh}, $2;"
        f"{direction}.cc.u32 l, al, bl; {direction}c.u32 h, ah, bh;"
        "mov.b64 $0, {l, h}; }", np.uint64, a, b)
    assert np.array_equal(got, a + b if direction == "add" else a - b)


def test_dot_product_of_bytes():
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 2**32, (3, 64), dtype=np.uint32)
    got = evaluate("dp4a.s32.s32 $0, $1, $2, $3;", np.uint32, a, b, c)
    bytes_a = a.view(np.int8).reshape(-1, 4).astype(np.int64)
    bytes_b = b.view(np.int8).reshape(-1, 4).astype(np.int64)
    want = (bytes_a * bytes_b).sum(1) + c.view(np.int32)
    assert np.array_equal(got, expect(want.tolist(), 32))
