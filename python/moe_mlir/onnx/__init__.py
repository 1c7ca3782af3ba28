"""Models with layers of experts as ONNX files that onnxruntime runs.

    moe_mlir.onnx.export(model, (ids,), "model.onnx")

Each layer of experts is one node, onnxruntime's `com.microsoft.MoE`, or `QMoE` where its weights
are quantized. Needs the packages onnx and onnxscript (`pip install moe-mlir[onnx]`).
"""

from .model_file import export

__all__ = ["export"]


def __dir__() -> list[str]:
    return sorted(__all__)
