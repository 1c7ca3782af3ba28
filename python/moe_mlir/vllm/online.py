"""`quantization="moe_int4"` and its like: a checkpoint in floats, rounded as it is loaded."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from ..ops._check import Checker
from ..quantization import FORMAT_NAMES, Rounding
from ..weights.model_layers import is_of_router
from .linear import release, run
from .methods import Quantized, Unquantized, why_not

_check = Checker("quantization_config")


class MoEMlirConfig(QuantizationConfig):
    """Rounds experts, linear layers and the head to the nearest code, as `moe_mlir.quantize` does."""

    # What a subclass for one name rounds to.
    format = "int4"

    def __init__(
        self, format: str | None = None, group: int | None = None, symmetric: bool = True,
        activations: str = "none", linears: bool = True,
    ) -> None:
        super().__init__()
        self.round = Rounding.of(_check, format or self.format, group, symmetric, activations)
        self.linears = linears

    @classmethod
    def get_name(cls) -> str:
        return "moe_mlir"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MoEMlirConfig":
        given = {name: value for name, value in config.items() if name != "quant_method"}
        known = ("format", "group", "symmetric", "activations", "linears")
        for name in given:
            _check.choice("names", name, known)
        return cls(**given)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        if isinstance(layer, RoutedExperts):
            return RoundedExperts(layer.moe_config, self)
        is_rounded = self.linears and not is_of_router(prefix) and not isinstance(layer, GateLinear)
        if isinstance(layer, LinearBase):
            return RoundedLinear(self) if is_rounded else UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead) and is_rounded:
            return RoundedHead(self)
        return None


class RoundedExperts(Quantized, Unquantized):
    """Experts that are loaded as floats."""

    def __init__(self, moe, config: MoEMlirConfig) -> None:
        if reason := why_not(moe):
            raise ValueError(f"expected experts that moe_mlir has kernels for, found: {reason}")
        Unquantized.__init__(self, moe)
        self.config = config

    def codes(self, layer, weight, halves):
        return self.config.round(getattr(layer, f"{weight}_weight").data, halves=halves)


class _Rounded(QuantizeMethodBase):
    """A layer with one weight, which is rounded unless code around the layer reads it."""

    def __init__(self, config: MoEMlirConfig) -> None:
        super().__init__()
        self.config = config

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # A convolution is stored as a layer of more dims; MLA multiplies by a weight itself.
        if layer.weight.dim() != 2 or getattr(layer, "_cpu_skip_gemm_dispatch", False):
            super().process_weights_after_loading(layer)
            return
        layer.moe_codes = self.config.round(layer.weight.data)
        # The embedding may have this weight, too: it keeps it.
        release(layer, "weight")

    def apply(self, layer, x, bias=None):
        return run(layer, x, bias) if hasattr(layer, "moe_codes") else super().apply(layer, x, bias)


class RoundedLinear(_Rounded, UnquantizedLinearMethod):
    pass


class RoundedHead(_Rounded, UnquantizedEmbeddingMethod):
    pass


def _config_of(format: str) -> type[MoEMlirConfig]:
    """The configuration that the name `moe_FORMAT` stands for."""
    name = f"moe_{format}"
    return type(f"MoEMlirConfig_{format}", (MoEMlirConfig,), {
        "__module__": __name__, "format": format, "get_name": classmethod(lambda cls: name)})


_CONFIGS = [_config_of(format) for format in FORMAT_NAMES]
# vLLM sends a configuration to its engine's process, where pickle looks a class up by its name.
globals().update({config.__name__: config for config in _CONFIGS})


def register() -> None:
    """Makes the names known to vLLM: `moe_mlir`, which takes options, and one for each format."""
    configs: list[type[MoEMlirConfig]] = [MoEMlirConfig, *_CONFIGS]
    for config in configs:
        register_quantization_config(config.get_name())(config)
