"""What the tensors of a quantized checkpoint stand for: codes, scales and zeros of its weights.

A format says which tensors of a checkpoint are parts of a weight, and reads them. `FORMATS` has
them by the `quant_method` of a checkpoint's `config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..ops._quantized import Quantization

# The tensor of a checkpoint by its name.
Tensors = Callable[[str], torch.Tensor]


class Codes(NamedTuple):
    """A weight `[.., out, in]` as codes, uint8 or in panels, and scales and zeros `[.., out, u]`."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None


class ReleasedFormat:
    """How a checkpoint stores its quantized weights."""

    quantization: Quantization
    is_transposed = False    # codes are [out, in] where the model's weight is [in, out]

    def weights(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Of each quantized weight, by the name that it would have as floats, its tensors."""
        raise NotImplementedError

    def read(self, parts: tuple[str, ...], tensors: Tensors) -> Codes:
        """The codes of a weight, from its tensors."""
        raise NotImplementedError


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Scales of e8m0, one byte each: 2^(byte - 127), which bfloat16 holds exactly."""
    exponents = exponents.view(torch.uint8)
    if (exponents == 255).any():
        raise ValueError("expected scales that are powers of two, found NaN (the byte 255)")
    return torch.ldexp(torch.tensor(1.0).expand(exponents.shape), exponents.int() - 127).to(torch.bfloat16)


def as_narrow_as_exact(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.int8:
        return scales
    for dtype in (torch.bfloat16, torch.float16):
        # In parts: most scales differ in the first, and a core's cache holds the others.
        if all(torch.equal(part.to(dtype).to(part.dtype), part)
               for part in scales.reshape(-1).split(1 << 16)):
            return scales.to(dtype)
    return scales.float()


def _float8_codes(weight: torch.Tensor, name: str) -> torch.Tensor:
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"expected {name!r} to be float8_e4m3fn, found {weight.dtype}")
    codes = weight.view(torch.uint8)
    if (codes & 127 == 127).any():
        raise ValueError(f"expected {name!r} to be finite, found NaN")
    return codes


def _scales_of_rows(scales: torch.Tensor, codes: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Those of blocks of rows, of rows, or of all of a weight."""
    out = codes.shape[-2]
    if scales.numel() == 1:
        scales = scales.reshape((1,) * codes.dim())
    rows = scales.repeat_interleave(out if scales.shape[-2] == 1 else block_rows, -2)
    return as_narrow_as_exact(rows[..., :out, :])


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """The codes of bytes `[.., c]`, of which the low half is the earlier feature: `[.., 2 c]`."""
    pairs = pairs.view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)


def unpack(words: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """The codes of int32 words `[.., c]`, from the lowest bits on: `[.., 32 / bits c]`.

    `order` says which of the codes of a word is the first, which the second.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if order:
        shifts = shifts[list(order)]
    return (words.unsqueeze(-1) >> shifts & 2**bits - 1).flatten(-2).to(torch.uint8)


def _stems(names: Iterable[str], suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


class MXFP4(ReleasedFormat):
    """gpt-oss: `W_blocks [.., out, u, 16]`, two codes a byte, and `W_scales [.., out, u]`."""

    quantization = Quantization("fp4_e2m1", 32)
    is_transposed = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def weights(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        known = set(names)
        return {stem: (f"{stem}_blocks", f"{stem}_scales") for stem in _stems(known, "_blocks")
                if f"{stem}_scales" in known}

    def read(self, parts: tuple[str, ...], tensors: Tensors) -> Codes:
        blocks, scales = map(tensors, parts)
        return Codes(_halves(blocks).flatten(-2), powers_of_two(scales))


class BlockFP8(ReleasedFormat):
    """DeepSeek, Qwen: `W`, float8_e4m3fn, and `W_scale_inv`, what a block is multiplied with.

    Blocks are `weight_block_size` of the configuration, 128 x 128 if it says nothing; a scale may
    also be of a row or of all of a weight.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        rows, group = config.get("weight_block_size", (128, 128)) or (1, 0)
        self.block_rows: int = rows
        self.quantization = Quantization("fp8_e4m3", group)

    def weights(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        known = set(names)
        return {name: (name, f"{name}_scale_inv") for name in _stems(known, "_scale_inv")
                if name in known}

    def read(self, parts: tuple[str, ...], tensors: Tensors) -> Codes:
        weight, scales = map(tensors, parts)
        codes = _float8_codes(weight, parts[0])
        if scales.element_size() == 1:
            scales = powers_of_two(scales)
        return Codes(codes, _scales_of_rows(scales, codes, self.block_rows))


def _group(size: int | None) -> int:
    return size if size and size > 0 else 0


def _bits_of_integers(bits: Any) -> str:
    if bits not in (4, 8):
        raise ValueError(f"expected weights of 4 or 8 bits, found {bits}")
    return f"int{bits}"


class GPTQ(ReleasedFormat):
    """`L.qweight [in / 8, out]` of int32, `L.qzeros [u, out / 8]`, `L.scales [u, out]`, `L.g_idx`.

    In checkpoints of the first version a zero is stored as what is one less.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.bits: int = config.get("bits", 0)
        self.quantization = Quantization(_bits_of_integers(self.bits),
                                         _group(config.get("group_size", 128)))
        self.first_zero = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def weights(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        known = set(names)
        return {f"{stem}.weight": tuple(
            f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
            if f"{stem}.{part}" in known) for stem in _stems(known, ".qweight")}

    def read(self, parts: tuple[str, ...], tensors: Tensors) -> Codes:
        words, zeros, scales, *index = map(tensors, parts)
        codes = unpack(words.T, self.bits)
        group = self.quantization.group or codes.shape[1]
        if index and not torch.equal(index[0].long(), torch.arange(codes.shape[1]) // group):
            raise ValueError(f"expected {parts[0]!r} with groups of neighbours, found the order of "
                             "activations (desc_act); load it as floats and call moe_mlir.quantize")
        zeros = unpack(zeros, self.bits).float() + self.first_zero
        return Codes(codes, scales.T, zeros.T.to(torch.bfloat16))


class AWQ(ReleasedFormat):
    """`L.qweight [in, out / 8]` of int32, `L.qzeros [u, out / 8]`, `L.scales [u, out]`."""

    # Of 8 outputs a word has first the even ones, then the odd ones.
    ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("bits", 4) != 4 or config.get("version", "gemm") != "gemm":
            raise ValueError("expected weights of 4 bits in AWQ's version 'gemm', found "
                             f"{config.get('bits')} and {config.get('version')!r}")
        self.quantization = Quantization("int4", _group(config.get("group_size", 128)))

    def weights(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        return {f"{stem}.weight": (f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales")
                for stem in _stems(names, ".qweight")}

    def read(self, parts: tuple[str, ...], tensors: Tensors) -> Codes:
        words, zeros, scales = map(tensors, parts)
        return Codes(unpack(words, 4, self.ORDER).T.contiguous(), scales.T,
                     unpack(zeros, 4, self.ORDER).T.to(torch.bfloat16))


class CompressedTensors(ReleasedFormat):
    """`W_packed` or `W`, `W_scale`, `W_zero_point`, `W_global_scale`, by the configuration's format."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = list((config.get("config_groups") or {}).values())
        schemes = [group.get("weights") or {} for group in groups]
        if not schemes or any(each != schemes[0] for each in schemes):
            raise ValueError("expected one scheme of compressed-tensors for all weights, found "
                             f"{len(schemes)}; load it as floats and call moe_mlir.quantize")
        scheme, self.format = schemes[0], groups[0].get("format") or config.get("format")
        if scheme.get("actorder") == "group":
            raise ValueError("expected groups of neighbours, found those in the order of activations "
                             "(actorder); load it as floats and call moe_mlir.quantize")
        self.bits: int = scheme.get("num_bits", 0)
        self.symmetric: bool = scheme.get("symmetric", True)
        group, self.block_rows = _group(scheme.get("group_size")), 1
        if scheme.get("strategy") == "block":
            self.block_rows, group = scheme["block_structure"]
        self.quantization = Quantization(self._codes(), group)

    def _codes(self) -> str:
        if self.format in ("pack-quantized", "int-quantized"):
            return _bits_of_integers(self.bits)
        known = {"float-quantized": "fp8_e4m3", "nvfp4-pack-quantized": "fp4_e2m1",
                 "mxfp4-pack-quantized": "fp4_e2m1"}
        if self.format not in known:
            raise ValueError("expected a format of compressed-tensors of 'pack-quantized', "
                             f"'int-quantized', {', '.join(map(repr, known))}, found {self.format!r}")
        return known[self.format]

    def weights(self, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        known, weights = set(names), {}
        for stem in _stems(known, "_scale"):
            stored = [name for name in (f"{stem}_packed", stem) if name in known]
            if stem.endswith(".weight") and stored:
                others = [f"{stem}_{part}" for part in ("shape", "zero_point", "global_scale")]
                weights[stem] = (stored[0], f"{stem}_scale",
                                 *(name for name in others if name in known))
        return weights

    def read(self, parts: tuple[str, ...], tensors: Tensors) -> Codes:
        weight, scales = map(tensors, parts[:2])
        others = {name.rpartition("weight_")[2]: tensors(name) for name in parts[2:]}
        if self.format == "float-quantized":
            codes = _float8_codes(weight, parts[0])
            return Codes(codes, _scales_of_rows(scales, codes, self.block_rows))
        if self.format == "nvfp4-pack-quantized":
            # The scale of a group is a float8; that of all is what they were multiplied with.
            return Codes(_halves(weight), scales.float() / others["global_scale"].float())
        if self.format == "mxfp4-pack-quantized":
            return Codes(_halves(weight), powers_of_two(scales))
        zeros = others.get("zero_point")
        middle = 2 ** (self.bits - 1)
        if self.format == "int-quantized":
            codes = (weight.short() + middle).to(torch.uint8)
            zeros = None if zeros is None else zeros.float() + middle
        else:
            codes = unpack(weight, self.bits)
            if "shape" in others:
                codes = codes[:, :int(others["shape"][1])]
            zeros = None if zeros is None else unpack(zeros.T, self.bits).T[:codes.shape[0]]
        if self.symmetric:
            zeros = None
        return Codes(codes, _scales_of_rows(scales, codes, 1),
                     None if zeros is None else zeros.to(torch.bfloat16).expand(
                         codes.shape[0], zeros.shape[1]))


FORMATS: dict[str, Callable[[Mapping[str, Any]], ReleasedFormat]] = {
    "awq": AWQ, "compressed-tensors": CompressedTensors, "fp8": BlockFP8, "gptq": GPTQ,
    "mxfp4": MXFP4, "mxfp8": BlockFP8,
}
