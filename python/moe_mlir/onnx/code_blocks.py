"""Quantized weights as onnxruntime reads them: codes in blocks along a row of the weight.

A weight is `scale (code - zero)`; the code in the middle is the zero where there are none. Codes of
4 bits share a byte, the earlier one in its lower half. Other whole numbers of up to 8 bits are
codes of 8 bits as well, without rounding: those of 6 bits, and twice the values of 4-bit floats.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..ops._expert_activation import ExpertActivation
from ..ops._quantized import (
    FORMATS,
    Quantization,
    floats_of_scales,
    unpack_codes,
    unpack_scales,
    values,
)

# Of our formats the bits of a code in a file.
BITS = {"int4": 4, "int6": 8, "int8": 8, "fp4_e2m1": 8}
# The sizes of blocks that the nodes take are powers of two from 16 on; larger ones save nothing.
LEAST, MOST = 16, 128


@dataclass(frozen=True)
class Blocks:
    """The layout of one weight `[experts, out, width]`.

    `size` divides the features that share a scale: a scale may stand for several blocks.
    """

    out: int
    width: int
    format: str
    group: int
    size: int
    halves: bool = False        # the panels keep the halves of a gate apart
    interleave: bool = False    # the file has the rows of the halves by turns
    is_linear: bool = False     # MatMulNBits: no experts, blocks have a dim of their own

    @property
    def bits(self) -> int:
        return BITS[self.format]

    @property
    def count(self) -> int:
        return -(-self.width // self.size)

    def attributes(self) -> dict[str, Any]:
        return {name: int(x) if isinstance(x, bool) else x for name, x in asdict(self).items()}

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> Blocks:
        given = {name: attributes[name] for name in cls.__dataclass_fields__}
        given.update({name: bool(given[name]) for name in ("halves", "interleave", "is_linear")})
        return cls(**given)

    def shapes(self, experts: int) -> list[tuple[int, ...]]:
        """Of codes, scales and zeros."""
        bytes_of_zeros = -(-self.count * self.bits // 8)
        if self.is_linear:
            return [(self.out, self.count, self.size * self.bits // 8), (self.out, self.count),
                    (self.out, bytes_of_zeros)]
        return [(experts, self.out, self.width * self.bits // 8), (experts, self.out, self.count),
                (experts, self.out, bytes_of_zeros)]


def _largest_block(*sizes: int) -> int:
    """The largest power of two that divides all of them, as far as blocks go."""
    common = math.gcd(*sizes)
    return min(common & -common, MOST)


def blocks_of_experts(
    first: Quantization, last: Quantization, d: int, hidden: int, activation: ExpertActivation,
) -> tuple[Blocks, Blocks]:
    """Of both weights of a layer of experts; a block divides their rows, and is of one size."""
    size = _largest_block(d, hidden, first.group or d, last.group or hidden)
    gated, halves = activation.gate != "none", activation.gate == "concatenated"
    return (Blocks(2 * hidden if gated else hidden, d, first.format, first.group, size,
                   halves=halves, interleave=halves),
            Blocks(d, hidden, last.format, last.group, size))


def blocks_of_linear(quantization: Quantization, out: int, width: int) -> Blocks:
    size = _largest_block(quantization.group or MOST)
    return Blocks(out, width, quantization.format, quantization.group, size, is_linear=True)


def why_no_blocks(blocks: Blocks) -> str:
    """Why a weight cannot be written in blocks; empty if it can."""
    if blocks.format not in BITS:
        return (f"expected codes of {', '.join(BITS)}, found {blocks.format}; quantize the model by "
                "'int4', 'int8' or 'mxfp4'")
    if blocks.size < LEAST:
        return ("expected rows and groups of a weight whose sizes are multiples of "
                f"{LEAST}, found rows of {blocks.width} in groups of {blocks.group or blocks.width}")
    return ""


def why_no_zeros(zeros: torch.Tensor | None, blocks: Blocks) -> str:
    """Why zeros cannot be written as codes; empty if they can."""
    if zeros is None:
        return ""
    if zeros.dtype == torch.int8:
        return ("expected a zero for each scale, found minima with scales of two levels (GGUF); "
                "load the model as floats, and quantize it")
    zeros = unpack_scales(zeros, blocks.out, halves=blocks.halves).float()
    last = 2 ** FORMATS[blocks.format].bits - 1
    if not ((zeros == zeros.round()) & (zeros >= 0) & (zeros <= last)).all():
        return f"expected whole zeros from 0 to {last}, found others"
    return ""


# ---- data ---------------------------------------------------------------------------------------


def codes(panels: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The bytes of the codes of a weight in panels."""
    found = unpack_codes(panels, blocks.out, blocks.width, blocks.format, halves=blocks.halves)
    if blocks.format == "int6":
        found = found + 96  # the zero of 6 bits, 32, becomes that of 8
    elif blocks.format == "fp4_e2m1":
        found = (128 + 2 * values(found, blocks.format)).to(torch.uint8)
    found = by_turns(found) if blocks.interleave else found
    if blocks.is_linear:
        found = torch.nn.functional.pad(found, (0, -blocks.width % blocks.size))
    return _joined(found, blocks.bits).reshape(blocks.shapes(panels.shape[0])[0])


def scales(panels: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    found = _of_blocks(floats_of_scales(
        unpack_scales(panels, blocks.out, halves=blocks.halves), blocks.group), blocks)
    if blocks.format == "fp4_e2m1":
        found = found / 2
    return found.reshape(blocks.shapes(panels.shape[0])[1])


def zeros(panels: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    found = _of_blocks(unpack_scales(panels, blocks.out, halves=blocks.halves).float(), blocks)
    if blocks.format == "int6":
        found = found + 96
    found = torch.nn.functional.pad(found.to(torch.uint8), (0, found.shape[-1] % 2))
    return _joined(found, blocks.bits)[..., :blocks.shapes(1)[2][-1]].reshape(
        blocks.shapes(panels.shape[0])[2])


def _of_blocks(of_groups, blocks):
    """Numbers of groups, `[experts, out, groups]`, for each block."""
    group = blocks.group or blocks.width
    places = torch.arange(blocks.count) * blocks.size // group
    found = of_groups[..., places]
    return by_turns(found) if blocks.interleave else found


def by_turns(rows: torch.Tensor) -> torch.Tensor:
    """`[experts, 2 n, ..]`, of which the first half are gates: a gate, its factor, the next gate .."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _joined(codes, bits):
    """Two codes of 4 bits in a byte; those of 8 as they are."""
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
