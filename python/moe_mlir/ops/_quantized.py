"""Quantized weights: their formats, and panels of codes and scales (docs/Spec.md 3.14).

A weight `[experts, out, in]` is `scale (value(code) - zero)`, with a scale for each group of
`in`. Kernels read codes in panels of q columns (of `out`), scales and zeros in panels, too:

    codes    [experts, p, t, q, 4]  int8; p = ceil(out / q), t as many as blocks of 32 of `in` take
    scales   [experts, p, u, q]     u = ceil(in / group); 1 where a row has one scale

Of 4 bits a byte has the codes of `in` 8t + s and, in its upper half, 8t + 4 + s; of 8 bits that
of 4t + s; of 6 bits two t have the lower 4 bits of 16 codes and the next one their upper 2. With a
concatenated gate half of a panel's columns are gates, then their factors.

Scales of int8 have two levels: of each 256 features (a superblock) a byte for each group, and the
two bytes of a float16 that these are multiplied with. What stands for zeros are minima then, and
a weight is `scale value(code) - minimum`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .._support.huge_pages import empty
from ..compiler.host_cpu import features_for
from ..compiler.uncached import target_cpu
from ._check import ACTIVATIONS, Checker

# Products are formed of so many features of x at a time, and rounded rows have a scale for each.
BLOCK = 32
# So many features share the second level of scales.
SUPERBLOCK = 256


# The values of the codes of fp4_e2m1.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_E2M1, *(-value for value in _E2M1)])


def _values_e4m3(codes: torch.Tensor) -> torch.Tensor:
    # Kernels read the two codes of NaN, which no weight has, as the next number.
    floats = codes.view(torch.float8_e4m3fn).float()
    return torch.where(codes & 127 == 127, torch.where(codes > 127, -480.0, 480.0), floats)


class Format(NamedTuple):
    """What codes stand for."""

    bits: int
    zero: int                # the code that stands for 0 where there are no zeros
    takes_zeros: bool
    values: Callable[[torch.Tensor], torch.Tensor]  # of codes, float32, before zeros and scales


FORMATS = {
    "int4": Format(4, 8, True, torch.Tensor.float),
    "int6": Format(6, 32, True, torch.Tensor.float),
    "int8": Format(8, 128, True, torch.Tensor.float),
    "fp4_e2m1": Format(4, 0, False, lambda codes: E2M1.to(codes.device)[codes.long()]),
    "fp8_e4m3": Format(8, 0, False, _values_e4m3),
}

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
        if self.format == "int6" and self.group == 8:
            check.fail("expected 'group' to be 0 (a row), 16 or a multiple of 32 with 'int6', found 8")
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
    steps = -(-width // BLOCK) * FORMATS[format].bits
    return experts, -(-out // columns), steps, columns, 4


def scales_shape(
    experts: int, out: int, width: int, group: int, columns: int, dtype: torch.dtype,
) -> tuple[int, ...]:
    if dtype == torch.int8:
        count = -(-width // SUPERBLOCK) * (SUPERBLOCK // group + 2)
    else:
        count = -(-width // group) if group else 1
    return experts, -(-out // columns), count, columns


def columns(w: torch.Tensor) -> int:
    return w.shape[3]


# ---- panels ------------------------------------------------------------------------


# So many codes are packed at a time: caches hold them in each order on the way, and what calls cost
# is little beside the work.
_AT_ONCE = 1 << 19


def pack_codes(codes: torch.Tensor, format: str, *, halves: bool) -> torch.Tensor:
    """Codes `[experts, out, in]`, uint8, in panels."""
    experts, out, width = codes.shape
    panels = empty_panels(experts, out, width, format)
    for mine, of_expert in zip(panels, codes):
        for rows in slices_of_rows(out, width, halves=halves):
            pack_rows(of_expert[rows], mine, rows.start, out, format, halves=halves)
    return panels


def is_packed(codes: torch.Tensor) -> bool:
    """Whether codes are in panels."""
    return codes.dtype == torch.int8


def empty_panels(experts: int, out: int, width: int, format: str) -> torch.Tensor:
    return empty(codes_shape(experts, out, width, format, columns_of_panels()), torch.int8)


def rows_at_once(width: int) -> int:
    """So many rows are read, decoded and packed at a time."""
    return max(1, _AT_ONCE // max(1, width))


def slices_of_rows(out: int, width: int, *, halves: bool) -> Iterator[slice]:
    """The rows of an expert in the order of its halves, few enough to be packed at once."""
    parts = 2 if halves else 1
    of_panel, of_part = columns_of_panels() // parts, out // parts
    step = rows_at_once(of_panel * width) * of_panel
    for part in range(0, out, max(1, of_part)):
        for first in range(part, part + of_part, step):
            yield slice(first, min(first + step, part + of_part))


def pack_rows(
    rows: torch.Tensor, panels: torch.Tensor, first: int, out: int, format: str, *, halves: bool,
) -> None:
    """Puts codes `[rows, in]`, one of `slices_of_rows` from row `first` on, in an expert's panels."""
    _, t, q, _ = panels.shape
    bits, of_panel = FORMATS[format].bits, q // 2 if halves else q
    part, first = divmod(first, out // 2 if halves else out)
    count = -(-rows.shape[0] // of_panel)
    # Rows that a power of two parts fall on the same lines of a cache: 64 bytes more, and they don't.
    padding = t * 32 // bits + 64 - rows.shape[1]
    rows = torch.nn.functional.pad(rows, (0, padding, 0, count * of_panel - rows.shape[0]))
    words = _to_words(rows.contiguous(), bits)[:, :t].unflatten(0, (count, of_panel)).unsqueeze(-1)
    mine = panels.view(torch.int32)[first // of_panel:][:count]
    mine[:, :, part * of_panel:(part + 1) * of_panel].copy_(words.transpose(1, 2))


def _to_words(codes, bits):
    """Of codes `[rows, in]` the lines, `[rows, t]`: int32, four bytes each."""
    assert bits in (4, 6, 8)
    words = codes.view(torch.int32)
    if bits == 8:
        return words
    if bits == 4:
        # Of eight codes the last four meet the first four in the lower half of a word.
        pairs = words.view(torch.int64)
        return (pairs | pairs >> 28).view(torch.int32)[:, ::2]
    low = _to_words(codes & 15, 4).unflatten(-1, (-1, 2))
    quads = (codes >> 4).view(torch.int32).unflatten(-1, (-1, 4))
    high = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
    return torch.cat([low, high.unsqueeze(-1)], dim=-1).flatten(-2)


def _from_bytes(lines, bits):
    """Of bytes `[.., t, 4]` the codes `[.., in]`."""
    if bits == 8:
        return lines.flatten(-2)
    if bits == 4:
        return torch.stack([lines & 15, lines >> 4], dim=-2).flatten(-3)
    low, high = lines.unflatten(-2, (-1, 3)).split([2, 1], dim=-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=lines.device).view(4, 1)
    upper = (high >> shifts & 3) << 4
    return _from_bytes(low.flatten(-3, -2), 4) | upper.flatten(-3)


def unpack_codes(
    panels: torch.Tensor, out: int, width: int, format: str, *, halves: bool,
) -> torch.Tensor:
    """The codes `[experts, out, in]`, uint8, of panels."""
    parts, bits = 2 if halves else 1, FORMATS[format].bits
    e, p, t, q, _ = panels.shape
    codes = panels.view(torch.uint8).view(e, p, t, parts, q // parts, 4)
    codes = codes.permute(0, 3, 1, 4, 2, 5).reshape(e, parts, p * q // parts, t, 4)
    return _from_bytes(codes, bits)[:, :, :out // parts, :width].reshape(e, out, width)


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
    return FORMATS[format].values(codes)


def of_two_levels(steps: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Scales `steps units`: int8 `[.., superblocks, groups]` and float16 `[.., superblocks]`."""
    low_and_high = units.unsqueeze(-1).contiguous().view(torch.int8)
    return torch.cat([steps, low_and_high], dim=-1).flatten(-2)


def floats_of_scales(scales: torch.Tensor, group: int) -> torch.Tensor:
    """Scales, or zeros, `[.., u]` in float32; a superblock of two levels is whole."""
    if scales.dtype != torch.int8:
        return scales.float()
    groups = SUPERBLOCK // group
    steps, low_and_high = scales.unflatten(-1, (-1, groups + 2)).split([groups, 2], dim=-1)
    units = low_and_high.contiguous().view(torch.float16)
    return (steps.float() * units.float()).flatten(-2)


def dequantize_codes(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, format: str, group: int,
) -> torch.Tensor:
    """The weight `[.., out, in]` of codes, in float32."""
    width = codes.shape[-1]
    group = group or width
    # A number of each group, not a copy of it for each weight, where groups are whole.
    is_whole = bool(group) and width % group == 0

    def spread(of_groups):
        wide = floats_of_scales(of_groups, group)
        if is_whole:
            return wide[..., :width // group].unsqueeze(-1)
        return wide.repeat_interleave(group, -1)[..., :width]
    numbers = values(codes, format)
    if is_whole:
        numbers = numbers.unflatten(-1, (-1, group))
    if zeros is not None and zeros.dtype == torch.int8:
        weights = spread(scales) * numbers - spread(zeros)
    else:
        zero = FORMATS[format].zero if zeros is None else spread(zeros)
        weights = spread(scales) * (numbers - zero)
    return weights.flatten(-2) if is_whole else weights


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
    check.dtype(names[1], scales, (*ACTIVATIONS, torch.int8))
    group = quantization.group
    if scales.dtype == torch.int8 and (group == 0 or SUPERBLOCK % group):
        check.fail(f"expected 'group' to divide {SUPERBLOCK} where {names[1]!r} are int8, which "
                   f"have two levels; found {group}")
    wanted = scales_shape(w.shape[0], out, width, group, q, scales.dtype)
    check.shape(names[1], scales, wanted, f"of scales of groups of {group or width}")
    if zeros is not None:
        if not FORMATS[quantization.format].takes_zeros:
            check.fail(f"expected no {names[2]!r} with format {quantization.format!r}, whose codes "
                       "have a sign; found some")
        check.dtype(names[2], zeros,
                    (torch.int8,) if scales.dtype == torch.int8 else ACTIVATIONS)
        check.shape(names[2], zeros, wanted, "of zeros, as of scales")
