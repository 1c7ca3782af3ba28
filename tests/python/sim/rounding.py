"""Correct rounding to any binary format, on exact rationals."""

from fractions import Fraction
from math import copysign, inf, isinf, isnan

import numpy as np

# name -> (exponent bits, mantissa bits, numpy type of the bits)
FORMATS = {
    "f32": (8, 23, np.uint32),
    "f64": (11, 52, np.uint64),
    "f16": (5, 10, np.uint16),
    "bf16": (8, 7, np.uint16),
    "tf32": (8, 10, np.uint32),
}


def to_integer(x, mode):
    """A rational rounded to an integer; modes of PTX, without the i."""
    floor = x.numerator // x.denominator
    rest = x - floor
    if mode == "rm":
        return floor
    if mode == "rp":
        return floor + (rest > 0)
    if mode == "rz":
        return floor + (rest > 0 and x < 0)
    half = Fraction(1, 2)
    if mode == "rna":  # ties away from zero
        return floor + (rest > half or rest == half and x > 0)
    assert mode == "rn"
    return floor + (rest > half or rest == half and floor % 2 == 1)


def to_format(x, name, mode="rn", zero=0.0):
    """The nearest value of the format as a Python float; exact zeros take the
    sign of `zero`. Python floats hold every value of every format."""
    exponent_bits, mantissa, _ = FORMATS[name]
    if isinstance(x, float):
        if isnan(x) or isinf(x):
            return x
        zero, x = x, Fraction(x)
    if x == 0:
        return copysign(0.0, zero)
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    if Fraction(2) ** exponent > abs(x):
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, 1 - bias) - mantissa)
    value = to_integer(x / unit, mode) * unit
    largest = (2 - Fraction(2) ** -mantissa) * Fraction(2) ** bias
    if abs(value) > largest:
        away = mode in ("rn", "rna") or mode == ("rp" if x > 0 else "rm")
        value = inf if away else largest
    return copysign(float(abs(value)), -1 if x < 0 else 1)


def encode(value, name):
    """The bits of a value that the format holds; NaN as PTX's canonical one."""
    exponent_bits, mantissa, dtype = FORMATS[name]
    if name == "f64":
        return np.float64(value).view(np.uint64)
    if isnan(value):
        width = 1 + exponent_bits + mantissa
        return dtype(0x7FFFFFFF if name in ("f32", "tf32") else
                     (1 << (width - 1)) - 1)
    if name == "f16":
        return np.float16(value).view(np.uint16)
    single = np.float32(value).view(np.uint32)
    return dtype(single >> 16) if name == "bf16" else dtype(single)


def decode(pattern, name):
    """Bits to a float64 array."""
    pattern = np.asarray(pattern)
    if name == "bf16":
        wide = pattern.astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    kinds = {"f16": np.float16, "f64": np.float64}
    return pattern.view(kinds.get(name, np.float32)).astype(np.float64)
