"""Linear layers of 4 and 8 bits in vLLM's models by the kernels of this package."""

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.scalar_type import scalar_types

from .._transformers.released_formats import BlockFP8, unpack
from ..experts.quantized_weight import QuantizedWeight
from ..ops._check import ACTIVATIONS
from ..ops._quantized import BLOCK, Quantization
from ..ops.quantized_linear import quantized_linear

_INTEGERS = {scalar_types.uint4: 4, scalar_types.uint4b8: 4,
             scalar_types.uint8: 8, scalar_types.uint8b128: 8}


def keep_codes(
    layer: torch.nn.Module, shape: tuple[int, int], dtype: torch.dtype,
    quantization: Quantization, codes: torch.Tensor, scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> None:
    """Gives a layer the weight `[out, in]` that `run` multiplies by."""
    layer.moe_codes = QuantizedWeight(shape, dtype, quantization, codes[None], scales[None],
                                      None if zeros is None else zeros[None])


def run(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    w = layer.moe_codes
    return quantized_linear(x, w.codes, w.scales, w.zeros, bias, w.shape[0], w.quantization)


def release(layer: torch.nn.Module, *names: str | None) -> None:
    """Frees what a checkpoint was loaded into; not all have all of it."""
    for name in names:
        if name and getattr(layer, name, None) is not None:
            setattr(layer, name, torch.nn.Parameter(torch.empty(0), requires_grad=False))


class WNA16(MPLinearKernel):
    """Integers of 4 or 8 bits: GPTQ, AWQ and compressed-tensors."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c):
        if c.weight_type not in _INTEGERS:
            return False, f"weights of {c.weight_type}"
        if c.act_type not in ACTIVATIONS:
            return False, f"activations of {c.act_type}"
        if c.group_size not in (-1, 8, 16) and c.group_size % BLOCK:
            return False, f"groups of {c.group_size}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        bits, group = _INTEGERS[self.config.weight_type], max(self.config.group_size, 0)
        width, out = self.config.partition_weight_shape
        words, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        # Words have codes along `in`, and stand as [out, in] or [in, out].
        codes = unpack(words.data if words.input_dim == 1 else words.data.T, bits)[:, :width]
        scales = scales.data if scales.output_dim == 0 else scales.data.T
        zeros = None
        if self.config.zero_points:
            stored = getattr(layer, self.w_zp_name)
            zeros = unpack(stored.data.T if stored.output_dim == 0 else stored.data, bits)
            zeros = zeros[:, :out].T.to(torch.bfloat16)
        keep_codes(layer, (out, width), self.config.act_type,
                   Quantization(f"int{bits}", group), codes, scales.contiguous(), zeros)
        release(layer, self.w_q_name, self.w_s_name, self.w_zp_name)

    def apply_weights(self, layer, x, bias=None):
        return run(layer, x, bias)


class BlocksOfFP8(Fp8BlockScaledMMLinearKernel):
    """float8_e4m3fn with a scale for each block; activations stay as they are."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        rows, columns = config.weight_quant_key.scale.group_shape
        if rows <= 0 or columns % BLOCK:
            return False, f"blocks of {rows} x {columns}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        params = self._get_layer_params(layer)
        format = BlockFP8({"weight_block_size": tuple(self.weight_group_shape)})
        parts = {"codes": params.weight.data, "scales": params.block_scale.data}
        keep_codes(layer, tuple(params.weight.shape), self.config.out_dtype, format.quantization,
                   *format.read(("codes", "scales"), parts.__getitem__))
        # MLA reads this weight, besides calling the layer.
        if not getattr(layer, "_cpu_skip_gemm_dispatch", False):
            release(layer, params.WEIGHT)

    def apply_weights(self, layer, x, bias=None, **kwargs):
        return run(layer, x, bias)

    def apply_block_scaled_mm(self, A, B, As, Bs):
        raise AssertionError("apply_weights does not call it")
