"""vLLM's methods for the weights of experts, with the kernels of this package.

A method makes the tensors that a checkpoint is loaded into, as vLLM's own does, and turns them
into what kernels read. vLLM itself has no kernels for experts of 4 or 8 bits on a CPU without AMX.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle
from vllm.model_executor.layers.fused_moe.oracle import int_wna16 as wna16_oracle
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)

from .._transformers.released_formats import (
    AWQ,
    GPTQ,
    MXFP4,
    BlockFP8,
    Codes,
    CompressedTensors,
    ReleasedFormat,
)
from ..experts.quantized_weight import QuantizedWeight
from ..ops._quantized import pack_codes
from .experts import MoEMlirExperts

# Both weights of a layer of experts, by vLLM's names.
_WEIGHTS = ("w13", "w2")


class Unquantized(UnquantizedFusedMoEMethod):
    """Experts in bfloat16, float16 or float32, in panels."""

    def __init__(self, moe):
        if why_not(moe):
            super().__init__(moe)
        else:
            FusedMoEMethodBase.__init__(self, moe)
            self.unquantized_backend = UnquantizedMoeBackend.CPU
            self.experts_cls = MoEMlirExperts


def why_not(moe) -> str:
    """Why our kernels cannot run experts of a configuration; empty if they can."""
    supported, reason = MoEMlirExperts.is_supported_config(
        MoEMlirExperts, moe, None, None, mk.FusedMoEActivationFormat.Standard)
    return "" if supported else str(reason)


class Quantized(FusedMoEMethodBase):
    """Experts of 4 to 8 bits, loaded as a method of vLLM loads them."""

    # Kernels take all sizes: those of vLLM ask for padding.
    maybe_roundup_sizes = FusedMoEMethodBase.maybe_roundup_sizes
    skip_forward_padding = FusedMoEMethodBase.skip_forward_padding
    has_unpadded_output = FusedMoEMethodBase.has_unpadded_output

    @abstractmethod
    def codes(self, layer: torch.nn.Module, weight: str, halves: bool) -> QuantizedWeight:
        """Of a layer as it was loaded the weight "w13" or "w2"."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        loaded = set(layer._parameters)
        experts, around = self._make_experts(layer)
        halves = experts.expert_activation.gate == "concatenated"
        codes = tuple(self.codes(layer, weight, halves and weight == "w13") for weight in _WEIGHTS)
        # What a checkpoint was loaded into goes, and the call finds codes by these names.
        for name in loaded - {"w13_bias", "w2_bias"}:
            del layer._parameters[name]
        for weight, each in zip(_WEIGHTS, codes):
            setattr(layer, f"{weight}_weight", torch.nn.Parameter(each.codes, requires_grad=False))
        experts.codes = codes
        self.moe_kernel = mk.FusedMoEKernel(around, experts)

    def _make_experts(self, layer):
        """Our experts, and what of vLLM moves tokens to and from them."""
        config = self.moe_quant_config = biased_moe_quant_config(
            *(self._bias(layer, f"{weight}_bias") for weight in _WEIGHTS),
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None))
        around = maybe_make_prepare_finalize(
            moe=self.moe, quant_config=config, routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True)
        assert around is not None
        return MoEMlirExperts(self.moe, config), around

    def _bias(self, layer, name):
        return getattr(layer, name, None)

    def get_fused_moe_quant_config(self, layer):
        return self.moe_quant_config

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            hidden_states=x, w1=layer.w13_weight, w2=layer.w2_weight, topk_weights=topk_weights,
            topk_ids=topk_ids, activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts, expert_map=layer.expert_map,
            shared_experts=shared_experts, shared_experts_input=shared_experts_input)


class _Released(Quantized):
    """Experts that a checkpoint has as codes."""

    @abstractmethod
    def format_of(self) -> ReleasedFormat:
        """How the checkpoint stores weights."""

    @abstractmethod
    def read(
        self, format: ReleasedFormat, layer: torch.nn.Module, weight: str, expert: int,
    ) -> Codes:
        """The codes `[out, in]` of an expert's weight."""

    def codes(self, layer, weight, halves):
        # One expert at a time: in memory beside the checkpoint's lie the codes of one, unpacked.
        format, experts = self.format_of(), range(layer.local_num_experts)
        panels, others = [], []
        for expert in experts:
            codes, *of_groups = self.read(format, layer, weight, expert)
            panels.append(pack_codes(codes[None], format.quantization.format, halves=halves))
            others.append(of_groups)
        shape = (len(experts), *codes.shape)
        scales, zeros = (None if each[0] is None else torch.stack(each) for each in zip(*others))
        return QuantizedWeight(shape, self.moe.in_dtype, format.quantization, torch.cat(panels),
                               scales, zeros, halves=halves)


@contextmanager
def _select_our_experts(oracle: Any) -> Iterator[None]:
    """Has vLLM select our experts, whatever kernels of its own it lists for this CPU."""
    before = oracle.backend_to_kernel_cls
    oracle.backend_to_kernel_cls = lambda backend: [MoEMlirExperts]
    try:
        yield
    finally:
        oracle.backend_to_kernel_cls = before


class _MXFP4(_Released):
    """Two codes of fp4_e2m1 a byte, and a power of two for each 32 features."""

    def format_of(self):
        return MXFP4({})

    def read(self, format, layer, weight, expert):
        def tensors(name):
            found = getattr(layer, name).data[expert]
            return found if name.endswith("scale") else found.unflatten(-1, (-1, 16))
        return format.read((f"{weight}_weight", f"{weight}_weight_scale"), tensors)


class GptOssMXFP4(_MXFP4, mxfp4.GptOssMxfp4MoEMethod):
    """gpt-oss as it was released."""

    def __init__(self, moe):
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_dtype = "gpt_oss_mxfp4"


class FP8(_Released, fp8.Fp8MoEMethod):
    """float8_e4m3fn with a scale for each block of a weight, or for all of it.

    Activations stay as they are, also where a checkpoint has scales for them.
    """

    def __init__(self, quant_config, layer):
        with _select_our_experts(fp8_oracle):
            super().__init__(quant_config, layer)

    def format_of(self):
        return BlockFP8({"weight_block_size": self.moe_block_shape})

    def read(self, format, layer, weight, expert):
        codes, scales = (getattr(layer, f"{weight}_{name}").data[expert]
                         for name in ("weight", self.weight_scale_name))
        # Gates and their factors have blocks, or a scale, of their own.
        parts = 2 if weight == "w13" and self.moe.is_act_and_mul else 1
        scales = scales.reshape(parts, -1) if not self.block_quant else scales
        pairs = [format.read(("codes", "scales"), dict(codes=each, scales=of_each).get)
                 for each, of_each in zip(codes.chunk(parts), scales.chunk(parts))]
        return Codes(*(None if each[0] is None else torch.cat(each) for each in zip(*pairs)))


class _WNA16(_Released):
    """Integers of 4 or 8 bits in int32 words."""

    # The tensors of a weight that its format reads, by vLLM's names.
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def read(self, format, layer, weight, expert):
        names = tuple(f"{weight}_{part}" for part in self.parts)
        return format.read(names, lambda name: getattr(layer, name).data[expert])

    def _bias(self, layer, name):
        loaded = getattr(layer, "_loaded_expert_biases", None)
        return getattr(layer, name, None) if loaded is None or name in loaded else None


class GPTQExperts(_WNA16, auto_gptq.AutoGPTQMoEMethod):
    """Experts of a checkpoint that GPTQModel or AutoGPTQ wrote."""

    def __init__(self, quant_config, moe):
        if quant_config.desc_act and quant_config.group_size != -1:
            raise ValueError("expected a GPTQ checkpoint with groups of neighbours, found the order "
                             "of activations (desc_act)")
        with _select_our_experts(wna16_oracle):
            super().__init__(quant_config, moe)

    def format_of(self):
        return GPTQ(self.quant_config.full_config)


class AWQExperts(_WNA16, auto_awq.AutoAWQMoEMethod):
    """Experts of a checkpoint that AutoAWQ wrote."""

    def __init__(self, quant_config, moe):
        with _select_our_experts(wna16_oracle):
            super().__init__(quant_config, moe)

    def format_of(self):
        return AWQ(self.quant_config.full_config)


class CompressedTensorsExperts(_WNA16, wna16.CompressedTensorsWNA16MoEMethod):
    """Experts of a checkpoint that llm-compressor wrote in the format "pack-quantized"."""

    def __init__(self, weight_quant, *args, **kwargs):
        with _select_our_experts(wna16_oracle):
            super().__init__(weight_quant, *args, **kwargs)
        self.parts = ("weight_packed", "weight_scale")
        if not self.symmetric:
            self.parts += ("weight_zero_point",)

    def format_of(self):
        scheme = self.weight_quant.model_dump(mode="json")
        return CompressedTensors({"config_groups": {
            "experts": {"weights": scheme, "format": "pack-quantized"}}})
