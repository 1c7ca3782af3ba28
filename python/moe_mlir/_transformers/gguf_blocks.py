"""What the blocks of a GGUF file stand for: codes, scales and zeros of a weight.

A tensor is rows of blocks, 32 or 256 weights each, and the blocks of a type are so many bytes.
Names and layouts are those of ggml (ggml-common.h); the package gguf says what floats they are.
A weight `d q - m` is `scale (code - zero)` with the scale d and the zero m / d. The scales of blocks
of 256 weights have two levels, as here, with the minima m beside them. Codes of 5 bits are stored
in 6, those of 2 and 3 bits in 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..ops._quantized import Quantization, of_two_levels
from .released_formats import Codes, powers_of_two

# Of blocks `[.., bytes]`: codes `[.., weights]`, scales and zeros `[.., groups]`.
Read = Callable[[torch.Tensor], Codes]


class BlockType(NamedTuple):
    """A type of blocks: bytes of each, what its weights are as codes, and how they are read."""

    bytes: int
    quantization: Quantization
    read: Read

    def weight(self, rows: torch.Tensor) -> Codes:
        """Of bytes `[.., row]` codes `[.., in]`, and scales and zeros `[.., in / group]`."""
        codes, scales, zeros = self.read(rows.unflatten(-1, (-1, self.bytes)))
        return Codes(codes.flatten(-2), scales.flatten(-2),
                     None if zeros is None else zeros.flatten(-2))


def _half(data: torch.Tensor) -> torch.Tensor:
    """The f16 that two bytes are, `[.., 1]`."""
    return data.view(torch.float16)


def _two_levels(steps: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    if not unit.isfinite().all():
        raise ValueError("expected finite scales, found NaN or infinity")
    return of_two_levels(steps.view(torch.int8), unit.squeeze(-1)).unsqueeze(-2)


# Runs of so many bytes are moved as one number of a type, longer ones as some of the last.
_RUNS = {4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _fields(data: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Fields of so many bits: of `size` bytes the lowest of each, then those above, and so on."""
    data, run = data.clone(memory_format=torch.contiguous_format), _RUNS[min(size, 16)]
    words = data.view(torch.int32 if size == 4 else torch.int64)
    mask = int.from_bytes(bytes([2**bits - 1]) * words.itemsize, "little")
    fields = data.new_empty(*data.shape[:-1], data.shape[-1] // size, 8 // bits, size)
    for i, mine in enumerate(fields.view(run).unbind(-2)):
        mine.copy_((words >> bits * i & mask).view(run).view(mine.shape))
    return fields.flatten(-3)


def _with_minimum(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> Codes:
    """The weight `scale code - minimum`, of codes `[.., weights]`."""
    scales, minima = scales.float(), minima.float()
    if not (scales.isfinite().all() and minima.isfinite().all()):
        raise ValueError("expected finite scales, found NaN or infinity")
    # Without a scale all weights of a group are the same.
    flat = scales == 0
    if flat.any():
        size = codes.shape[-1] // scales.shape[-1]
        codes = codes.masked_fill(flat.repeat_interleave(size, -1), 0)
        scales = torch.where(flat, minima, scales)
    zeros = torch.where(scales == 0, 0.0, minima / scales)
    return Codes(codes, scales, zeros)


def _q4_0(blocks):
    return Codes(_fields(blocks[..., 2:], 4, 16), _half(blocks[..., :2]))


def _q4_1(blocks):
    return _with_minimum(_fields(blocks[..., 4:], 4, 16), _half(blocks[..., :2]),
                         -_half(blocks[..., 2:4]))


def _fifth_bits(data):
    """Bit i of four bytes, as 16 in place i."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q5_0(blocks):
    codes = _fields(blocks[..., 6:], 4, 16) | _fifth_bits(blocks[..., 2:6])
    return Codes(codes + (32 - 16), _half(blocks[..., :2]))


def _q5_1(blocks):
    codes = _fields(blocks[..., 8:], 4, 16) | _fifth_bits(blocks[..., 4:8])
    return _with_minimum(codes, _half(blocks[..., :2]), -_half(blocks[..., 2:4]))


def _q8_0(blocks):
    return Codes(blocks[..., 2:].contiguous() ^ 128, _half(blocks[..., :2]))


def _q2_k(blocks):
    both, codes = blocks[..., :16], _fields(blocks[..., 16:80], 2, 32)
    return Codes(codes, _two_levels(both & 15, _half(blocks[..., 80:82])),
                 _two_levels(both >> 4, _half(blocks[..., 82:84])))


def _q3_k(blocks):
    high, low = _fields(blocks[..., :32], 1, 32), _fields(blocks[..., 32:96], 2, 32)
    scales = _fields(blocks[..., 96:104], 4, 8) | _fields(blocks[..., 104:108], 2, 4) << 4
    # Of 3 bits the middle is 4, that of 4 bits is 8.
    return Codes(low + (high << 2) + (8 - 4),
                 _two_levels(scales.view(torch.int8) - 32, _half(blocks[..., 108:110])))


def _scales_and_minima(data):
    """Eight scales and eight minima of 6 bits, in twelve bytes."""
    first, second, rest = data.split(4, dim=-1)
    return (torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=-1),
            torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=-1))


def _k_with_minimum(blocks, codes):
    scales, minima = _scales_and_minima(blocks[..., 4:16])
    return Codes(codes, _two_levels(scales, _half(blocks[..., :2])),
                 _two_levels(minima, _half(blocks[..., 2:4])))


def _q4_k(blocks):
    return _k_with_minimum(blocks, _fields(blocks[..., 16:], 4, 32))


def _q5_k(blocks):
    high = _fields(blocks[..., 16:48], 1, 32)
    return _k_with_minimum(blocks, _fields(blocks[..., 48:], 4, 32) | high << 4)


def _q6_k(blocks):
    codes = _fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4
    return Codes(codes, _two_levels(blocks[..., 192:208], _half(blocks[..., 208:210])))


def _mxfp4(blocks):
    return Codes(_fields(blocks[..., 1:], 4, 16), powers_of_two(blocks[..., :1]))


# By the names of gguf.GGMLQuantizationType.
BLOCK_TYPES = {
    "Q4_0": BlockType(18, Quantization("int4", 32), _q4_0),
    "Q4_1": BlockType(20, Quantization("int4", 32), _q4_1),
    "Q5_0": BlockType(22, Quantization("int6", 32), _q5_0),
    "Q5_1": BlockType(24, Quantization("int6", 32), _q5_1),
    "Q8_0": BlockType(34, Quantization("int8", 32), _q8_0),
    "Q2_K": BlockType(84, Quantization("int4", 16), _q2_k),
    "Q3_K": BlockType(110, Quantization("int4", 16), _q3_k),
    "Q4_K": BlockType(144, Quantization("int4", 32), _q4_k),
    "Q5_K": BlockType(176, Quantization("int6", 32), _q5_k),
    "Q6_K": BlockType(210, Quantization("int6", 16), _q6_k),
    "MXFP4": BlockType(17, Quantization("fp4_e2m1", 32), _mxfp4),
}
