"""Floating point instructions against exact rational arithmetic."""

from fractions import Fraction
from math import inf, isfinite, isnan, nan

import numpy as np
import pytest
from ptxlib import evaluate, fill, pairs
from rounding import decode, encode, to_format, to_integer

F32 = [0.0, -0.0, 1.0, -1.0, 1.5, 2.5, 3.5, -2.5, 0.1, 1 / 3, -7.25, 255.5,
       2.0**24 + 2, 3.0e38, -3.0e38, 1.1754943508222875e-38, 1e-39, -1e-40,
       1.4e-45, 65504.0, 65519.0, 65520.0, 2147483648.0, -2147483648.0,
       4294967296.0, 9.3e18, inf, -inf, nan]
F64 = F32 + [1e300, -1e-300, 5e-324, 1 + 2.0**-52, 2.0**53 + 2]
F16 = [0.0, -0.0, 1.0, -1.0, 1.5, 2.5, 0.1, -7.25, 2049.0, 65504.0, -65504.0,
       6.1e-5, 6e-8, -6e-8, inf, -inf, nan]


def array_of(values, name):
    return np.array([encode(to_format(v, name), name) for v in values])


def plain(array, name):
    return [float(v) for v in decode(array, name)]


def same(got, want, name):
    """Equal bits; any NaN for a NaN unless the canonical one is promised."""
    got_bits, want = np.asarray(got), [float(w) for w in want]
    for g, value, w in zip(got_bits.tolist(), plain(got_bits, name), want):
        if isnan(w):
            assert isnan(value), f"{value} for NaN"
        else:
            assert g == int(encode(w, name)), f"{value!r} for {w!r}"


def flush(x):
    """Subnormal f32 to zero of the same sign."""
    if isfinite(x) and 0 < abs(x) < 2.0**-126:
        return -0.0 if x < 0 else 0.0
    return x


def exactly(op, *x):
    """The op on Python floats: a Fraction, or a float if special."""
    if op == "fma" and isfinite(x[0]) and isfinite(x[1]) and not isfinite(x[2]):
        return x[2]  # the product has no range of its own
    if any(not isfinite(v) for v in x):
        with np.errstate(all="ignore"):
            v = [np.float64(i) for i in x]
            return float({"add": lambda: v[0] + v[1],
                          "sub": lambda: v[0] - v[1],
                          "mul": lambda: v[0] * v[1],
                          "div": lambda: v[0] / v[1],
                          "fma": lambda: v[0] * v[1] + v[2]}[op]())
    f = [Fraction(v) for v in x]
    if op == "div":
        if f[1] == 0:
            with np.errstate(all="ignore"):
                return float(np.float64(x[0]) / np.float64(x[1]))
        return f[0] / f[1]
    return {"add": lambda: f[0] + f[1], "sub": lambda: f[0] - f[1],
            "mul": lambda: f[0] * f[1],
            "fma": lambda: f[0] * f[1] + f[2]}[op]()


def signed_zero(op, x, mode):
    """The sign of an exact zero result."""
    def negative(v):
        return np.signbit(np.float64(v))

    if op in ("mul", "div"):
        return -0.0 if negative(x[0]) != negative(x[1]) else 0.0
    left = negative(x[0]) != negative(x[1]) if op == "fma" else negative(x[0])
    last = x[2] if op == "fma" else x[1]
    right = negative(last) != (op == "sub")
    zeros = (x[0] * x[1] == 0 if op == "fma" else x[0] == 0) and last == 0
    if zeros and left == right:
        return -0.0 if left else 0.0
    return -0.0 if mode == "rm" else 0.0


def arithmetic(op, x, name, mode, ftz=False, sat=False):
    if ftz:
        x = [flush(v) for v in x]
    exact = exactly(op, *x)
    if isinstance(exact, Fraction) and exact == 0:
        result = signed_zero(op, x, mode)
    else:
        result = to_format(exact, name, mode)
    if ftz:
        result = flush(result)
    if sat:
        result = 0.0 if isnan(result) else min(max(result, 0.0), 1.0)
        result = result + 0.0  # clamps -0
    return result


ROUNDINGS = ["rn", "rz", "rm", "rp"]


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_rounded_arithmetic(op, name, mode):
    values = array_of(F32 if name == "f32" else F64, name)
    a, b = pairs(values, values.dtype)
    got = evaluate(f"{op}.{mode}.{name} $0, $1, $2;", a.dtype, a, b)
    same(got, [arithmetic(op, x, name, mode)
               for x in zip(plain(a, name), plain(b, name))], name)


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_fused_multiply_add(name, mode):
    values = array_of(F32 if name == "f32" else F64, name)
    a, b = pairs(values, values.dtype)
    rng = np.random.default_rng(0)
    c = rng.choice(values, len(a))
    c[::3] = array_of([-x * y for x, y in zip(plain(a, name), plain(b, name))],
                      name)[::3]  # cancellation
    got = evaluate(f"fma.{mode}.{name} $0, $1, $2, $3;", a.dtype, a, b, c)
    same(got, [arithmetic("fma", x, name, mode) for x in
               zip(plain(a, name), plain(b, name), plain(c, name))], name)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
@pytest.mark.parametrize("modifier", ["ftz", "sat", "ftz.sat"])
def test_flush_and_saturate(op, modifier):
    values = array_of(F32, "f32")
    a, b = pairs(values, values.dtype)
    got = evaluate(f"{op}.rn.{modifier}.f32 $0, $1, $2;", a.dtype, a, b)
    want = [arithmetic(op, x, "f32", "rn", "ftz" in modifier,
                       "sat" in modifier)
            for x in zip(plain(a, "f32"), plain(b, "f32"))]
    if "sat" in modifier:  # the sign of a saturated zero is left open
        assert np.array_equal(decode(got, "f32"), want)
    else:
        same(got, want, "f32")


def smaller(a, b, nan_wins):
    if isnan(a) or isnan(b):
        return nan if nan_wins or isnan(a) and isnan(b) else (
            b if isnan(a) else a)
    if a == b == 0:
        return a if np.signbit(a) else b
    return min(a, b)


@pytest.mark.parametrize("name, values", [
    ("f32", F32), ("f64", F64), ("f16", F16), ("bf16", F32)])
def test_minimum_and_maximum(name, values):
    values = array_of(values, name)
    a, b = pairs(values, values.dtype)
    x, y = plain(a, name), plain(b, name)
    for nan_wins in [False] if name == "f64" else [False, True]:
        suffix = ".NaN" * nan_wins
        got = evaluate(f"min{suffix}.{name} $0, $1, $2;", a.dtype, a, b)
        want = [smaller(*v, nan_wins) for v in zip(x, y)]
        same(got, want, name)
        got = evaluate(f"max{suffix}.{name} $0, $1, $2;", a.dtype, a, b)
        want = [-smaller(-u, -v, nan_wins) for u, v in zip(x, y)]
        same(got, want, name)
        if name != "f64":  # a NaN result is the canonical one
            nans = [isnan(w) for w in want]
            assert (got[nans] == encode(nan, name)).all()


def test_minimum_flushes():
    values = array_of(F32, "f32")
    a, b = pairs(values, values.dtype)
    got = evaluate("min.ftz.f32 $0, $1, $2;", a.dtype, a, b)
    same(got, [smaller(flush(x), flush(y), False)
               for x, y in zip(plain(a, "f32"), plain(b, "f32"))], "f32")


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
def test_sign_operations(name):
    a = fill(array_of(F16, name), array_of([0.0], name).dtype)
    x = plain(a, name)
    same(evaluate(f"neg.{name} $0, $1;", a.dtype, a), [-v for v in x], name)
    same(evaluate(f"abs.{name} $0, $1;", a.dtype, a), [abs(v) for v in x],
         name)


def test_copysign():
    values = array_of(F32, "f32")
    a, b = pairs(values, values.dtype)
    got = evaluate("copysign.f32 $0, $1, $2;", a.dtype, a, b)
    assert np.array_equal(got, (a & 0x80000000) | (b & 0x7FFFFFFF))


ORDERED = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("name, values", [
    ("f32", F32), ("f64", F64), ("f16", F16), ("bf16", F32)])
def test_comparisons(name, values):
    values = array_of(values, name)
    a, b = pairs(values, values.dtype)
    cases = list(zip(plain(a, name), plain(b, name)))

    def compare(mnemonic):
        return evaluate(f"setp.{mnemonic}.{name} p, $1, $2;"
                        "selp.u32 $0, 1, 0, p;", np.uint32, a, b)

    unordered = np.array([isnan(x) or isnan(y) for x, y in cases])
    for mnemonic, f in ORDERED.items():
        plain_result = np.array([f(x, y) for x, y in cases]) & ~unordered
        assert np.array_equal(compare(mnemonic), plain_result), mnemonic
        assert np.array_equal(compare(mnemonic + "u"),
                              plain_result | unordered), mnemonic + "u"
    assert np.array_equal(compare("num"), ~unordered)
    assert np.array_equal(compare("nan"), unordered)


def test_comparison_flushes():
    a = fill(array_of([1e-40, -1e-40, 0.0, 1.4e-45], "f32"), np.uint32)
    zero = np.zeros_like(a)
    for mnemonic, count in (("eq.ftz", 32), ("eq", 8), ("gt.ftz", 0)):
        got = evaluate(f"setp.{mnemonic}.f32 p, $1, $2;"
                       "selp.u32 $0, 1, 0, p;", np.uint32, a, zero)
        assert got.sum() == count, mnemonic


def test_testp():
    a = fill(array_of(F32, "f32"), np.uint32)
    x = plain(a, "f32")
    tests = {
        "finite": isfinite, "infinite": lambda v: abs(v) == inf,
        "number": lambda v: not isnan(v), "notanumber": isnan,
        "normal": lambda v: isfinite(v) and abs(v) >= 2.0**-126,
        "subnormal": lambda v: 0 < abs(v) < 2.0**-126,
    }
    for name, f in tests.items():
        got = evaluate(f"testp.{name}.f32 p, $1; selp.u32 $0, 1, 0, p;",
                       np.uint32, a)
        assert np.array_equal(got, [f(v) for v in x]), name


# --- conversions --------------------------------------------------------------


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64",
                                "u64"])
@pytest.mark.parametrize("name, values", [("f32", F32), ("f64", F64),
                                          ("f16", F16)])
def test_float_to_integer_clamps(name, values, to):
    width = int(to[1:])
    a = fill(array_of(values, name), array_of([0.0], name).dtype)
    low, high = ((-(1 << (width - 1)), (1 << (width - 1)) - 1)
                 if to[0] == "s" else (0, (1 << width) - 1))
    # The PTX ISA on NaN: zero for 32-bit and narrower sources and results.
    wide = name == "f64" or width == 64
    for mode in ROUNDINGS:
        def convert(v, mode=mode):
            if isnan(v):
                return (1 << (width - 1)) if wide else 0
            if abs(v) == inf:
                return high if v > 0 else low
            return min(max(to_integer(Fraction(v), mode), low), high)

        register = f"u{max(16, width) // 8}"
        got = evaluate(f"cvt.{mode}i.{to}.{name} $0, $1;", register, a)
        x = plain(a, name)
        keep = [not (isnan(v) and wide) for v in x]
        mask = (1 << width) - 1
        want = [convert(v) & mask for v in x]
        got = [v & mask for v in got.tolist()]
        assert [g for g, k in zip(got, keep) if k] == [
            w for w, k in zip(want, keep) if k], mode


@pytest.mark.parametrize("source", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", ["f32", "f64", "f16"])
def test_integer_to_float(source, name):
    width = int(source[1:])
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**64, 64, dtype=np.uint64)
    patterns >>= rng.integers(0, 64, 64).astype(np.uint64)
    patterns[:6] = 0, 2**64 - 1, 2**63, 2**24 + 1, 2**53 + 1, 65519
    a = patterns.astype(f"u{width // 8}")
    integers = a.astype(source.replace("s", "i").replace(
        str(width), str(width // 8))).tolist()
    for mode in ROUNDINGS:
        got = evaluate(f"cvt.{mode}.{name}.{source} $0, $1;",
                       array_of([0.0], name).dtype, a)
        want = [to_format(Fraction(v), name, mode) for v in integers]
        same(got, want, name)


@pytest.mark.parametrize("to, source, modes", [
    ("f16", "f32", ROUNDINGS), ("bf16", "f32", ["rn", "rz"]),
    ("f32", "f64", ROUNDINGS), ("f16", "f64", ROUNDINGS),
    ("f32", "f16", [""]), ("f32", "bf16", [""]), ("f64", "f32", [""]),
    ("f64", "f16", [""])])
def test_float_to_float(to, source, modes):
    near = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8,
            1 + 2.0**-24, -1 - 3 * 2.0**-24, 2.0**-24, 2.0**-25, 2.0**-149,
            65535.9, 3.39e38, 3.4e38]
    a = fill(array_of(F64 + near, source), array_of([0.0], source).dtype)
    for mode in modes:
        name = f"cvt.{mode}.{to}.{source}".replace("..", ".")
        got = evaluate(f"{name} $0, $1;", array_of([0.0], to).dtype, a)
        same(got, [to_format(v, to, mode or "rn") for v in plain(a, source)],
             to)


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("name, values", [("f32", F32), ("f64", F64)])
def test_round_to_integral(name, values, mode):
    a = fill(array_of(values, name), array_of([0.0], name).dtype)
    got = evaluate(f"cvt.{mode}i.{name}.{name} $0, $1;", a.dtype, a)
    want = [v if not isfinite(v) or v == 0 else
            np.copysign(float(to_integer(Fraction(v), mode)), v)
            for v in plain(a, name)]
    same(got, want, name)


def test_saturating_and_flushing_conversions():
    a = fill(array_of(F32, "f32"), np.uint32)
    x = plain(a, "f32")
    got = evaluate("cvt.sat.f32.f32 $0, $1;", np.float32, a)
    want = [0.0 if isnan(v) else min(max(v, 0.0), 1.0) for v in x]
    assert np.array_equal(got, np.array(want, np.float32))
    got = evaluate("cvt.ftz.f32.f32 $0, $1;", np.uint32, a)
    same(got, [flush(v) for v in x], "f32")
    got = evaluate("cvt.rn.relu.bf16.f32 $0, $1;", np.uint16, a)
    want = [max(v, 0.0) if not isnan(v) else nan
            for v in (to_format(v, "bf16") for v in x)]
    assert np.array_equal(decode(got, "bf16"), want, equal_nan=True)


def test_tf32_rounds_ties_away():
    values = F32 + [1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-12]
    a = fill(array_of(values, "f32"), np.uint32)
    got = evaluate("cvt.rna.tf32.f32 $0, $1;", np.uint32, a)
    finite = [isfinite(v) for v in plain(a, "f32")]
    want = [encode(to_format(v, "tf32", "rna"), "tf32") if f else 0
            for v, f in zip(plain(a, "f32"), finite)]
    mask = np.uint32(0xFFFFE000)  # the rest is not part of the number
    assert np.array_equal((got & mask)[finite], np.array(want)[finite])


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_packed_conversion_has_the_first_source_on_top(to):
    values = array_of(F32, "f32")
    a, b = pairs(values, np.uint32)
    got = evaluate(f"cvt.rn.{to}x2.f32 $0, $1, $2;", np.uint32, a, b)
    halves = got.view(np.uint16).reshape(-1, 2)
    same(halves[:, 0], [to_format(v, to) for v in plain(b, "f32")], to)
    same(halves[:, 1], [to_format(v, to) for v in plain(a, "f32")], to)


def fp8(x, name):
    """Nearest e4m3 or e5m2, overflow to the largest finite."""
    exponent_bits, mantissa, top = {"e4m3": (4, 3, 448.0),
                                    "e5m2": (5, 2, 57344.0)}[name]
    if isnan(x):
        return 0x7F
    sign = 0x80 if np.signbit(np.float64(x)) else 0
    bias = 2 ** (exponent_bits - 1) - 1
    x = min(abs(x), top)
    if x == 0:
        return sign
    exponent = max(np.frexp(x)[1] - 1, 1 - bias)
    steps = to_integer(Fraction(x) / Fraction(2) ** (exponent - mantissa), "rn")
    return sign + steps + ((exponent + bias - 1) << mantissa)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8_conversions(name):
    values = array_of(F32 + [448.0, 464.0, 480.0, 57344.0, 61440.0, 0.0175,
                             2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-17], "f32")
    a, b = pairs(values, np.uint32)
    got = evaluate(f"cvt.rn.satfinite.{name}x2.f32 $0, $1, $2;", np.uint16, a,
                   b)
    low = [fp8(v, name) for v in plain(b, "f32")]
    high = [fp8(v, name) for v in plain(a, "f32")]
    assert np.array_equal(got, [h << 8 | l for h, l in zip(high, low)])

    every = np.arange(256, dtype=np.uint16)
    every |= every << 8
    got = evaluate(f"cvt.rn.f16x2.{name}x2 $0, $1;", np.uint32, every)
    halves = got.view(np.float16).reshape(-1, 2)
    assert np.array_equal(halves[:, 0], halves[:, 1], equal_nan=True)
    for pattern, value in enumerate(halves[:, 0].tolist()):
        if isfinite(value):
            assert fp8(value, name) == pattern
        elif name == "e5m2":
            assert pattern & 0x7F >= 0x7C
        else:
            assert pattern & 0x7F == 0x7F and isnan(value)


# --- packed halves ------------------------------------------------------------


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "min", "max"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_packed_arithmetic(name, op):
    if name == "bf16" and op in ("add", "sub", "mul"):
        prefix = f"{op}.rn.bf16"  # sm_90
    else:
        prefix = f"{op}.rn.{name}" if op in ("add", "sub", "mul", "fma") else (
            f"{op}.{name}")
    values = array_of(F16, name)
    a, b = pairs(values, np.uint16)
    c = np.roll(a, 5)
    operands = [a, b, c] if op == "fma" else [a, b]
    packed = [np.stack([x, np.roll(x, 1)], 1).copy().view(np.uint32)[:, 0]
              for x in operands]
    sources = "$1, $2, $3" if op == "fma" else "$1, $2"
    got = evaluate(f"{prefix}x2 $0, {sources};", np.uint32, *packed)
    scalar = evaluate(f"{prefix} $0, {sources};", np.uint16, *operands)
    numbers = list(zip(*(plain(x, name) for x in operands)))
    if op in ("min", "max"):
        sign = 1 if op == "min" else -1
        want = [sign * smaller(sign * x, sign * y, False) for x, y in numbers]
    else:
        want = [arithmetic(op, x, name, "rn") for x in numbers]
    same(scalar, want, name)
    halves = got.view(np.uint16).reshape(-1, 2)
    same(halves[:, 0], want, name)
    same(halves[:, 1], np.roll(want, 1), name)


# --- approximations: the PTX ISA's error bounds -------------------------------


def sweep(low, high, count=4096):
    return np.random.default_rng(0).uniform(low, high, count).astype(
        np.float32)


@pytest.mark.parametrize("numerics", ["exact", "perturbed"])
@pytest.mark.parametrize("code, x, f, relative, absolute", [
    ("ex2.approx.ftz.f32", sweep(-60, 60), np.exp2, 2.0**-21, 0),
    ("ex2.approx.f32", sweep(-100, 100), np.exp2, 2.0**-21, 0),
    ("lg2.approx.f32", sweep(2, 1e6), np.log2, 2.0**-20, 0),
    ("lg2.approx.f32", sweep(0.5, 2), np.log2, 0, 2.0**-21),
    ("rcp.approx.ftz.f32", sweep(0.1, 1e6), lambda v: 1 / v, 2.0**-21, 0),
    ("rsqrt.approx.f32", sweep(0.1, 1e6), lambda v: v**-0.5, 2.0**-20.9, 0),
    ("sqrt.approx.f32", sweep(0.1, 1e6), np.sqrt, 2.0**-20.9, 0),
    ("sin.approx.f32", sweep(-3.14, 3.14), np.sin, 0, 2.0**-19.9),
    ("cos.approx.f32", sweep(-3.14, 3.14), np.cos, 0, 2.0**-19.9),
    ("tanh.approx.f32", sweep(-8, 8), np.tanh, 2.0**-10.5, 0),
])
def test_approximations(code, x, f, relative, absolute, numerics):
    got = evaluate(f"{code} $0, $1;", np.float32, x, numerics=numerics)
    want = f(x.astype(np.float64))
    assert np.allclose(got, want, relative, absolute)
    if numerics == "perturbed" and not absolute:
        exact = evaluate(f"{code} $0, $1;", np.float32, x)
        assert not np.array_equal(got, exact), "nothing was perturbed"


@pytest.mark.parametrize("code, cases", [
    ("ex2.approx.ftz.f32", [(-inf, 0.0), (inf, inf), (0.0, 1.0),
                            (-0.0, 1.0), (nan, nan), (-127.5, 0.0)]),
    ("lg2.approx.f32", [(0.0, -inf), (-0.0, -inf), (inf, inf), (-1.0, nan),
                        (1.0, 0.0)]),
    ("rcp.approx.f32", [(0.0, inf), (-0.0, -inf), (inf, 0.0), (-inf, -0.0)]),
    ("rcp.approx.ftz.f32", [(1e-40, inf), (-1e-40, -inf)]),
    ("rsqrt.approx.f32", [(0.0, inf), (-0.0, -inf), (inf, 0.0), (-1.0, nan)]),
    ("sqrt.approx.f32", [(0.0, 0.0), (-0.0, -0.0), (inf, inf),
                         (-1.0, nan), (4.0, 2.0)]),
    ("sqrt.rn.f32", [(0.0, 0.0), (-0.0, -0.0), (inf, inf),
                     (-1.0, nan), (2.25, 1.5)]),
    ("tanh.approx.f32", [(inf, 1.0), (-inf, -1.0), (0.0, 0.0)]),
])
def test_special_values(code, cases):
    a = fill(array_of([x for x, _ in cases], "f32"), np.uint32)
    got = evaluate(f"{code} $0, $1;", np.uint32, a)
    same(got, np.resize([y for _, y in cases], len(a)), "f32")


@pytest.mark.parametrize("code, ulps", [
    ("div.approx.f32", 2), ("div.full.f32", 2), ("div.rn.f32", 0.5)])
def test_division_bounds(code, ulps):
    a, b = sweep(-1e6, 1e6), sweep(0.01, 1e4)
    got = evaluate(f"{code} $0, $1, $2;", np.float32, a, b)
    want = a.astype(np.float64) / b
    ulp = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    assert (np.abs(got - want) <= ulps * ulp * 1.001).all()


@pytest.mark.parametrize("mode", ROUNDINGS)
def test_rounded_root_and_reciprocal(mode):
    x = sweep(0.01, 1e6, 256)
    got = evaluate(f"sqrt.{mode}.f32 $0, $1;", np.float32, x)
    for g, v in zip(got.tolist(), x.tolist()):
        g, v = Fraction(g), Fraction(v)
        step = Fraction(float(np.spacing(np.float32(g))))
        if mode == "rn":
            assert (g - step / 2) ** 2 <= v <= (g + step / 2) ** 2
        elif mode == "rp":
            assert (g - step) ** 2 < v <= g**2
        else:
            assert g**2 <= v < (g + step) ** 2
    got = evaluate(f"rcp.{mode}.f32 $0, $1;", np.uint32, x)
    same(got, [to_format(1 / Fraction(v), "f32", mode) for v in x.tolist()],
         "f32")
