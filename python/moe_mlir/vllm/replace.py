"""What of vLLM is replaced, all in one place; it has names for some of these, not for others."""

from vllm.model_executor.kernels import linear as vllm_linear
from vllm.model_executor.layers.fused_moe.router import router_factory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)
from vllm.platforms import PlatformEnum

from . import linear, methods, online, router

# Classes that vLLM looks up in these modules when it makes a layer.
_CLASSES = (
    (router_factory, "CPURouter", router.MoEMlirRouter),
    (mxfp4, "GptOssMxfp4MoEMethod", methods.GptOssMXFP4),
    (fp8, "Fp8MoEMethod", methods.FP8),
    (auto_gptq, "AutoGPTQMoEMethod", methods.GPTQExperts),
    (auto_awq, "AutoAWQMoEMethod", methods.AWQExperts),
    (compressed_tensors_moe_wna16, "CompressedTensorsWNA16MoEMethod",
     methods.CompressedTensorsExperts),
)
# Linear kernels that vLLM asks in this order.
_KERNELS = (
    (vllm_linear._POSSIBLE_KERNELS[PlatformEnum.CPU], linear.WNA16),
    (vllm_linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU], linear.BlocksOfFP8),
)


def replace() -> None:
    """Has vLLM find classes of this package where it looks for its own."""
    UnquantizedFusedMoEMethod.register_oot(methods.Unquantized)
    for module, name, ours in _CLASSES:
        setattr(module, name, ours)
    for kernels, ours in _KERNELS:
        # Before those that ask for AMX, or are slower.
        kernels.insert(0, ours)
    online.register()
