"""Quantized weights: their formats, and panels of codes and scales (docs/Spec.md 3.14).

A weight `[experts, out, in]` is `scale (value(code) - zero)`, with a scale for each group of
`in`. Kernels read codes in panels of q columns (of `out`), scales and zeros in panels, too:

    codes    [experts, p, t, q, 4]  int8; p = ceil(out / q), t as many as blocks of 32 of `in` take
    scales   [experts, p, u, q]     u = ceil(in / group); 1 where a row has one scale

Of 4 bits a byte has the codes of `in` 8t + s and, in its upper half, 8t + 4 + s; of 8 bits that
of 4t + s. With a concatenated gate half of a panel's columns are gates, then their factors.
"""

import functools
from typing import NamedTuple

import torch

from .._support.huge_pages import empty
from ..compiler.host_cpu import features_for
from ..compiler.uncached import target_cpu
from ._check import ACTIVATIONS, Checker

# Products are formed of so many features of x at a time, and rounded rows have a scale for each.
BLOCK = 32


class Format(NamedTuple):
    """What codes stand for."""

    bits: int
    zero: int                # the code that stands for 0 where there are no zeros
    takes_zeros: bool

    @property
    def codes_per_step(self) -> int:
        return 4 * (8 // self.bits)


FORMATS = {
    "int4": Format(4, 8, True),
    "int8": Format(8, 128, True),
    "fp4_e2m1": Format(4, 0, False),
    "fp8_e4m3": Format(8, 0, False),
}
# The values of the codes of fp4_e2m1.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_E2M1, *(-value for value in _E2M1)])

ROUNDINGS = ("none", "int8")


class Quantization(NamedTuple):
    """How a weight is stored, and how rows are rounded before they are multiplied with it.

    The defaults are those of the schemas: torch leaves out arguments that equal them.
    """

    format: str = "int4"
    group: int = 32          # 0: a row of the weight has one scale
    activations: str = "none"

    def validate(self, check: Checker) -> None:
        check.choice("format", self.format, tuple(FORMATS))
        check.choice("activations", self.activations, ROUNDINGS)
        if self.group not in (0, 8, 16) and (self.group < 0 or self.group % BLOCK):
            check.fail(f"expected 'group' to be 0 (a row), 8, 16 or a multiple of {BLOCK}, found "
                       f"{self.group}")


def columns_of_panels() -> int:
    """Those that kernels multiply at once: two vectors of AVX-512, or of AVX2."""
    return _columns_for(target_cpu())


@functools.cache
def _columns_for(cpu):
    return 32 if "avx512f" in features_for(cpu) else 16


def codes_shape(experts: int, out: int, width: int, format: str, columns: int) -> tuple[int, ...]:
    steps = -(-width // BLOCK) * BLOCK // FORMATS[format].codes_per_step
    return experts, -(-out // columns), steps, columns, 4


def scales_shape(experts: int, out: int, width: int, group: int, columns: int) -> tuple[int, ...]:
    return experts, -(-out // columns), -(-width // group) if group else 1, columns


def columns(w: torch.Tensor) -> int:
    return w.shape[3]


# ---- panels ------------------------------------------------------------------------


def pack_codes(codes: torch.Tensor, format: str, *, halves: bool) -> torch.Tensor:
    """Codes `[experts, out, in]`, uint8, in panels."""
    experts, out, width = codes.shape
    shape = codes_shape(experts, out, width, format, columns_of_panels())
    panels = empty(shape, torch.int8)
    for mine, of_expert in zip(panels, codes):
        mine.copy_(_pack_expert(of_expert, FORMATS[format], shape[1:], halves).view(torch.int8))
    return panels


def _pack_expert(codes, format, shape, halves):
    p, t, q, _ = shape
    parts = 2 if halves else 1
    codes = codes.reshape(parts, -1, codes.shape[-1])
    codes = torch.nn.functional.pad(
        codes, (0, t * format.codes_per_step - codes.shape[2], 0, p * q // parts - codes.shape[1]))
    codes = codes.view(parts, p, q // parts, t, 8 // format.bits, 4)
    codes = codes[..., 0, :] if format.bits == 8 else codes[..., 0, :] | codes[..., 1, :] << 4
    return codes.permute(1, 3, 0, 2, 4).reshape(shape)


def unpack_codes(
    panels: torch.Tensor, out: int, width: int, format: str, *, halves: bool,
) -> torch.Tensor:
    """The codes `[experts, out, in]`, uint8, of panels."""
    parts, bits = 2 if halves else 1, FORMATS[format].bits
    e, p, t, q, _ = panels.shape
    codes = panels.view(torch.uint8).view(e, p, t, parts, q // parts, 4)
    codes = codes.permute(0, 3, 1, 4, 2, 5).reshape(e, parts, p * q // parts, t, 4)
    codes = codes.unsqueeze(-2) if bits == 8 else torch.stack([codes & 15, codes >> 4], dim=-2)
    return codes.reshape(e, parts, p * q // parts, -1)[:, :, :out // parts, :width].reshape(
        e, out, width)


def pack_scales(scales: torch.Tensor, *, halves: bool) -> torch.Tensor:
    """Scales, or zeros, `[experts, out, u]` in panels."""
    e, out, u = scales.shape
    q, parts = columns_of_panels(), 2 if halves else 1
    p = -(-out // q)
    rows = scales.reshape(e, parts, out // parts, u)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, p * q // parts - out // parts))
    rows = rows.view(e, parts, p, q // parts, u)
    panels = empty((e, p, u, q), scales.dtype)
    panels.view(e, p, u, parts, q // parts).copy_(rows.permute(0, 2, 4, 1, 3))
    return panels


def unpack_scales(panels: torch.Tensor, out: int, *, halves: bool) -> torch.Tensor:
    """The scales, or zeros, `[experts, out, u]` of panels."""
    e, p, u, q = panels.shape
    parts = 2 if halves else 1
    rows = panels.view(e, p, u, parts, q // parts).permute(0, 3, 1, 4, 2)
    return rows.reshape(e, parts, p * q // parts, u)[:, :, :out // parts].reshape(e, out, u)


# ---- meaning -----------------------------------------------------------------------


def values(codes: torch.Tensor, format: str) -> torch.Tensor:
    """What codes stand for, float32, before zeros and scales."""
    if format == "fp4_e2m1":
        return E2M1.to(codes.device)[codes.long()]
    if format == "fp8_e4m3":
        floats = codes.view(torch.float8_e4m3fn).float()
        return torch.where(codes & 127 == 127, torch.where(codes > 127, -480.0, 480.0), floats)
    return codes.float()


def dequantize_codes(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, format: str, group: int,
) -> torch.Tensor:
    """The weight `[.., out, in]` of codes, in float32."""
    width = codes.shape[-1]

    def spread(of_groups):
        wide = of_groups.float()
        return wide.repeat_interleave(group, -1)[..., :width] if group else wide
    zero = FORMATS[format].zero if zeros is None else spread(zeros)
    return spread(scales) * (values(codes, format) - zero)


def dequantize_panels(
    w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, out: int, width: int,
    quantization: Quantization, *, halves: bool,
) -> torch.Tensor:
    """The weight `[experts, out, in]` of panels, in float32."""
    format, group, _ = quantization
    codes = unpack_codes(w, out, width, format, halves=halves)
    scales = unpack_scales(scales, out, halves=halves)
    zeros = None if zeros is None else unpack_scales(zeros, out, halves=halves)
    return dequantize_codes(codes, scales, zeros, format, group)


def round_rows(x: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """Rows as they are multiplied: `a q` for each block, with q the nearest integers."""
    if quantization.activations == "none":
        return x
    size, width = min(quantization.group or BLOCK, BLOCK), x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    blocks = torch.nn.functional.pad(x.to(wide), (0, -width % size)).unflatten(-1, (-1, size))
    most = blocks.abs().amax(-1, keepdim=True)
    # A number divided by a tensor would be its reciprocal, rounded, times the number.
    inverse = torch.full_like(most, 127.0).div(most).clamp(max=torch.finfo(torch.float32).max)
    rounded = (blocks * inverse).round().clamp(-127, 127) * (most / 127.0)
    return rounded.flatten(-2)[..., :width]


def validate_weight(
    check: Checker, names: tuple[str, str, str], w: torch.Tensor, scales: torch.Tensor,
    zeros: torch.Tensor | None, out: int, width: int, quantization: Quantization,
) -> None:
    """That codes, scales and zeros are those of a weight `[experts, out, width]`."""
    check.rank(names[0], w, "[experts, panels, steps, columns, 4]")
    check.dtype(names[0], w, (torch.int8,))
    q = columns(w)
    if q == 0 or q % 2:
        check.fail(f"expected {names[0]!r} in panels of an even number of columns, found {q}")
    check.shape(names[0], w, codes_shape(w.shape[0], out, width, quantization.format, q),
                f"of panels of {quantization.format} for {width} features and {out} of y")
    wanted = scales_shape(w.shape[0], out, width, quantization.group, q)
    check.dtype(names[1], scales, ACTIVATIONS)
    check.shape(names[1], scales, wanted, f"of scales of groups of {quantization.group or width}")
    if zeros is not None:
        if not FORMATS[quantization.format].takes_zeros:
            check.fail(f"expected no {names[2]!r} with format {quantization.format!r}, whose codes "
                       "have a sign; found some")
        check.dtype(names[2], zeros, ACTIVATIONS)
        check.shape(names[2], zeros, wanted, "of zeros, as of scales")
