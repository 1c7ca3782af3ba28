"""Two numbers in a register, and min and max of three, against numpy."""

import numpy as np
import pytest
from ptxlib import evaluate, fill

RNG = np.random.default_rng(0)
EDGES16 = [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234]


def pairs_of(dtype):
    """Registers whose halves are every pair of edge values and random ones."""
    halves = np.concatenate([
        np.array(np.meshgrid(EDGES16, EDGES16), np.uint16).reshape(2, -1).T,
        RNG.integers(0, 2**16, (64, 2), dtype=np.uint16)])
    halves = np.resize(halves, (-(-len(halves) // 32) * 32, 2))
    return np.ascontiguousarray(halves).view(dtype)


INTEGER = {
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), 0),
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), 0),
}


@pytest.mark.parametrize("op, kind", [
    (op, kind) for op in INTEGER for kind in ("u16", "s16")
    if kind == "s16" or "relu" not in op])
def test_pairs_of_16_bits(op, kind):
    dtype = {"u16": np.uint16, "s16": np.int16}[kind]
    a, b = pairs_of(dtype), np.roll(pairs_of(dtype), 7, axis=0)
    out = evaluate(f"{op}.{kind}x2 $0, $1, $2;", np.uint32,
                   a.view(np.uint32).ravel(), b.view(np.uint32).ravel())
    with np.errstate(over="ignore"):
        want = INTEGER[op](a, b).astype(dtype)
    assert np.array_equal(out.view(dtype).reshape(-1, 2), want)


@pytest.mark.parametrize("op", ["min", "max"])
def test_32_bit_relu(op):
    a = fill([5, -5, 0, 2**31 - 1, -(2**31), 17], np.int32)
    b = np.roll(a, 1)
    out = evaluate(f"{op}.relu.s32 $0, $1, $2;", np.int32, a, b)
    assert np.array_equal(out, INTEGER[f"{op}.relu"](a, b))


def floats():
    special = [0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, 1e-40, -1e-42,
               3e38, -3e38, 1e-38]
    values = np.concatenate([special, RNG.standard_normal(116)])
    return np.ascontiguousarray(values, np.float32).reshape(-1, 2)


def flush(x):
    tiny = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_pairs_of_32_bit_floats(op, ftz):
    a, b, c = (np.roll(floats(), shift) for shift in (0, 11, 29))
    inputs = [a, b, c] if op == "fma" else [a, b]
    operands = ", ".join(f"${i + 1}" for i in range(len(inputs)))
    out = evaluate(f"{op}.rn{ftz}.f32x2 $0, {operands};", np.uint64,
                   *(x.view(np.uint64).ravel() for x in inputs))
    prepare = flush if ftz else lambda x: x
    x, y, z = (prepare(v) for v in (a, b, c))
    with np.errstate(all="ignore"):
        want = prepare({
            "add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y,
            # A product of two floats is exact in double, and a second rounding
            # of these sums changes nothing: longdouble confirms it below.
            "fma": lambda: (x.astype(np.longdouble) * y + z).astype(np.float32),
        }[op]())
    got = out.view(np.float32).reshape(-1, 2)
    assert np.array_equal(got, want, equal_nan=True)
    # Signed zeros too, where the reference rounds as the hardware does.
    if op != "fma":
        numbers = ~np.isnan(want)
        assert np.array_equal(np.signbit(got[numbers]),
                              np.signbit(want[numbers]))


@pytest.mark.parametrize("op, pick", [("min", np.fmin), ("max", np.fmax)])
def test_three_operands(op, pick):
    a, b, c = (np.roll(fill([1.0, -3.0, 7.5, np.nan, np.inf, 0.25, -np.inf],
                            np.float32), shift) for shift in (0, 2, 5))
    out = evaluate(f"{op}.f32 $0, $1, $2, $3;", np.float32, a, b, c)
    assert np.array_equal(out, pick(pick(a, b), c), equal_nan=True)
    out = evaluate(f"{op}.NaN.f32 $0, $1, $2, $3;", np.float32, a, b, c)
    propagating = {"min": np.minimum, "max": np.maximum}[op]
    assert np.array_equal(out, propagating(propagating(a, b), c),
                          equal_nan=True)


@pytest.mark.parametrize("op, pick", [("min", min), ("max", max)])
def test_warp_reduction_of_magnitudes(op, pick):
    x = RNG.standard_normal(64).astype(np.float32)
    x[40] = np.nan
    out = evaluate(f"redux.sync.{op}.abs.NaN.f32 $0, $1, -1;", np.float32, x)
    assert (out[:32] == pick(np.abs(x[:32]))).all()
    assert np.isnan(out[32:]).all()
