"""A quantized weight as a part of a model: its codes, scales and zeros, in panels."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops._quantized import (
    FORMATS,
    Quantization,
    columns,
    columns_of_panels,
    dequantize_panels,
    is_packed,
    pack_codes,
    pack_scales,
    unpack_codes,
    unpack_scales,
    values,
)
from ..ops.run_quantized_experts import QuantizedOperands


class QuantizedWeight(torch.nn.Module):
    """What stands where a layer had a weight: codes, scales and zeros as buffers.

    It has no gradient. Layers of experts and `QuantizedLinear` read it; `dequantize` gives the
    weight as floats. Its buffers are in the layer's `state_dict()`, so that a model that was
    quantized in the same way loads them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, quantization: Quantization,
        codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None, *,
        transposed: bool = False, halves: bool = False,
    ) -> None:
        """Of a weight of this shape and dtype; codes `[experts, out, in]` are uint8, or in panels."""
        super().__init__()
        self.shape, self.dtype, self.quantization = shape, dtype, quantization
        self.transposed, self.halves = transposed, halves
        self.register_buffer("codes", codes if is_packed(codes) else pack_codes(
            codes, quantization.format, halves=halves))
        self.register_buffer("scales", pack_scales(scales, halves=halves))
        self.register_buffer(
            "zeros", None if zeros is None else pack_scales(zeros, halves=halves))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def data(self) -> torch.Tensor:
        """Not there: what merges adapters into a weight, as PEFT does, asks for it."""
        raise TypeError(
            f"expected a weight of floats, found codes ({self.quantization.format}); merge adapters "
            "before moe_mlir.quantize(model), or read .dequantize()")

    @property
    def out_and_in(self) -> tuple[int, int]:
        first, last = self.shape[-2:]
        return (last, first) if self.transposed else (first, last)

    def operands(self, bias: torch.Tensor | None) -> QuantizedOperands:
        return QuantizedOperands(self.codes, self.scales, self.zeros, bias)

    def dequantize(self) -> torch.Tensor:
        """The weight as floats, in the shape and dtype that it had."""
        out, width = self.out_and_in
        w = dequantize_panels(self.codes, self.scales, self.zeros, out, width, self.quantization,
                              halves=self.halves)
        return (w.mT if self.transposed else w).reshape(self.shape).to(self.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedWeight:
        # A cast of the model is one of what it computes in; scales keep their digits.
        scales, zeros = self.scales, self.zeros
        super()._apply(fn, recurse)
        cast = fn(torch.empty(0, dtype=self.dtype, device=scales.device))
        if cast.dtype != self.dtype:
            self.dtype = cast.dtype
            self.scales = scales.to(self.codes.device)
            self.zeros = None if zeros is None else zeros.to(self.codes.device)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        codes = state_dict.get(f"{prefix}codes")
        if codes is not None and codes.dim() == 5 and columns(codes) != columns_of_panels():
            self._repack(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _repack(self, state_dict, prefix):
        """Panels of a CPU with other vectors in those of this one."""
        (out, width), format = self.out_and_in, self.quantization.format
        codes = unpack_codes(state_dict[f"{prefix}codes"], out, width, format, halves=self.halves)
        state_dict[f"{prefix}codes"] = pack_codes(codes, format, halves=self.halves)
        for name in ("scales", "zeros"):
            if (of_groups := state_dict.get(f"{prefix}{name}")) is not None:
                state_dict[f"{prefix}{name}"] = pack_scales(
                    unpack_scales(of_groups, out, halves=self.halves), halves=self.halves)

    @property
    def description(self) -> str:
        """How it is rounded, in words."""
        format, group, activations = self.quantization
        rounded = "" if activations == "none" else f", activations={activations}"
        return f"{format}, group={group or 'row'}{rounded}"

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.description}"

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


# ---- rounding to the nearest code ---------------------------------------------------


def quantize_weight(
    w: torch.Tensor, quantization: Quantization, *, symmetric: bool = True, exponents: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes `[.., out, in]`, uint8, scales and zeros `[.., out, u]` of a weight `[.., out, in]`.

    Each group of `in` has its own scale, and each weight the code that is nearest.

    Args:
        symmetric: the code in the middle stands for 0; otherwise a group reaches from its least
            weight to its largest, and has a zero.
        exponents: scales are powers of two, as those of MXFP4.
        dtype: of scales and zeros.
    """
    format, group = quantization.format, quantization.group or w.shape[-1]
    width = w.shape[-1]
    # A group of padding repeats its last weight, which changes no extreme.
    groups = torch.nn.functional.pad(w.float(), (0, -width % group), mode="replicate") \
        if width % group else w.float()
    groups = groups.unflatten(-1, (-1, group))
    if not groups.isfinite().all():
        raise ValueError("expected finite weights to quantize, found NaN or infinity")
    zeros = None
    if format in _LARGEST:
        scales = _scales_of_floats(groups, _LARGEST[format], exponents).to(dtype)
        codes = _NEAREST[format](groups, scales.float())
    elif symmetric:
        scales, codes = _symmetric(groups, FORMATS[format], dtype)
    else:
        scales, zeros, codes = _asymmetric(groups, FORMATS[format], dtype)
    return codes.flatten(-2)[..., :width], scales, zeros


def _divide(groups, scales):
    scales = scales.unsqueeze(-1)
    return torch.where(scales == 0, 0.0, groups / scales)


def _symmetric(groups, format, dtype):
    # The weight of the largest magnitude gets the lowest code, of which there is one more.
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = (extreme / -format.zero).to(dtype)
    codes = (_divide(groups, scales.float()) + format.zero).round()
    return scales, codes.clamp(0, 2 ** format.bits - 1).to(torch.uint8)


def _asymmetric(groups, format, dtype):
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    last = 2 ** format.bits - 1
    scales = ((most - least) / last).to(dtype)
    zeros = torch.where(scales == 0, 0.0, (-least / scales.float()).round()).clamp(0, last)
    codes = (_divide(groups, scales.float()) + zeros.unsqueeze(-1)).round().clamp(0, last)
    return scales, zeros.to(dtype), codes.to(torch.uint8)


# The largest value of a code.
_LARGEST = {"fp4_e2m1": 6.0, "fp8_e4m3": 448.0}


def _scales_of_floats(groups, largest, exponents):
    most = groups.abs().amax(-1)
    if not exponents:
        return most / largest
    # As in the OCP specification: the exponent of the largest magnitude, less that of a code's.
    of_code = math.floor(math.log2(largest))
    return torch.where(most == 0, 0.0, torch.exp2(torch.floor(torch.log2(most)) - of_code))


def _nearest_e4m3(groups, scales):
    return _divide(groups, scales).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def _nearest_e2m1(groups, scales):
    magnitudes = values(torch.arange(8), "fp4_e2m1").to(groups.device)
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    ratios = _divide(groups, scales)
    # A tie goes to the even mantissa, as in IEEE 754.
    codes = torch.bucketize(ratios.abs(), between)
    tie = ratios.abs() == between[codes.clamp(max=6)]
    codes = torch.where(tie & (codes % 2 == 1), codes + 1, codes)
    return (codes + 8 * (ratios < 0)).to(torch.uint8)


_NEAREST = {"fp4_e2m1": _nearest_e2m1, "fp8_e4m3": _nearest_e4m3}


def quantized(
    w: torch.Tensor, quantization: Quantization, *, transposed: bool = False, halves: bool = False,
    symmetric: bool = True, exponents: bool = False,
) -> QuantizedWeight:
    """A weight `[experts, out, in]`, `[experts, in, out]` if `transposed`, or `[out, in]`."""
    rows = w.detach().mT if transposed else w.detach()
    rows = rows.reshape(-1, *rows.shape[-2:])
    # One expert at a time: what lies beside the result in memory is that of one.
    parts = [quantize_weight(each, quantization, symmetric=symmetric, exponents=exponents)
             for each in rows]
    codes, scales, zeros = (torch.stack(each) if each[0] is not None else None
                            for each in zip(*parts))
    assert codes is not None and scales is not None
    return QuantizedWeight(tuple(w.shape), w.dtype, quantization, codes, scales, zeros,
                           transposed=transposed, halves=halves)


def bits_per_weight(weight: QuantizedWeight) -> float:
    """With scales, zeros and what pads panels."""
    return 8 * weight.nbytes / math.prod(weight.shape)
