"""Weights of 4 to 8 bits, decoded as kernels read them.

    moe_mlir.quantize(model, "int4")     # in place: experts and linear layers
    moe_mlir.quantize(model, "mxfp4", linears=False)
    moe_mlir.save_pretrained(model, "folder")
    model = moe_mlir.from_pretrained("openai/gpt-oss-20b")    # as it was released

A token reads each weight of its experts once: of 4 bits that is a quarter of the memory
traffic of bfloat16, which is what decoding waits for. Quantized weights have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ._support.changes import Changes, Tally
from ._support.log import warn_user
from ._support.modules import require_module
from ._transformers.names import untie
from ._transformers.released import load
from ._transformers.released_formats import Codes
from ._transformers.saved import save
from .experts.activation_detection import keep_activation
from .experts.packed_weight import Panels
from .experts.quantized_weight import QuantizedWeight, quantized
from .ops._check import Checker
from .ops._quantized import FORMATS, ROUNDINGS, Quantization, is_packed
from .ops.quantized_linear import quantized_linear
from .packing import give_back
from .weights.implementations import run_by_kernels
from .weights.model_layers import (
    OF_ROUTER,
    TRAINED,
    ModelLayers,
    is_experts,
    is_of_router,
    layer_activation,
    weight_names,
)

_check = Checker("quantize")

# What a name stands for: the codes of a weight, the features that share a scale, and whether
# scales are powers of two.
_NAMES = {"int4": ("int4", 32, False), "int6": ("int6", 32, False), "int8": ("int8", 32, False),
          "fp8": ("fp8_e4m3", 128, False), "mxfp4": ("fp4_e2m1", 32, True),
          "mxfp8": ("fp8_e4m3", 32, True)}
FORMAT_NAMES = tuple(_NAMES)


@dataclass(frozen=True)
class Rounding:
    """How weights are rounded; called with one, it is the weight as codes."""

    quantization: Quantization
    symmetric: bool
    exponents: bool

    @classmethod
    def of(
        cls, check: Checker, format: str, group: int | None, symmetric: bool, activations: str,
    ) -> Rounding:
        """That of the arguments of `quantize`, which `check` refuses where they are wrong."""
        check.choice("format", format, FORMAT_NAMES)
        codes, default, exponents = _NAMES[format]
        quantization = Quantization(codes, default if group is None else group, activations)
        quantization.validate(check)
        if not symmetric and not FORMATS[codes].takes_zeros:
            check.fail(f"expected symmetric=True with {format!r}, whose codes have a sign; found False")
        return cls(quantization, symmetric, exponents)

    def __call__(
        self, weight: torch.Tensor, *, transposed: bool = False, halves: bool = False,
    ) -> QuantizedWeight:
        return quantized(weight, self.quantization, transposed=transposed, halves=halves,
                         symmetric=self.symmetric, exponents=self.exponents)


def quantize(
    model: torch.nn.Module,
    format: Literal["int4", "int6", "int8", "fp8", "mxfp4", "mxfp8"] = "int4",
    *,
    group: int | None = None,
    symmetric: bool = True,
    activations: Literal["none", "int8"] = "none",
    linears: bool = True,
) -> Changes:
    """Rounds the weights of a model's experts and linear layers to codes of 4, 6 or 8 bits, in place.

    Each weight gets the code that is nearest to it (round to nearest). Results differ from the
    model's by what was rounded away; compare them on your data.

    Args:
        model: any module. Layers are those that `pack_experts` and `pack_linears` take, not
            routers. A head whose weight is that of the embedding gets codes of its own, and the
            embedding keeps the weight: of transformers' models `config.tie_word_embeddings`
            becomes False. Experts of transformers run with the experts implementation "moe" from
            then on. PEFT's adapters stay as they are, so that they can be trained.
        format: "int4", "int6" or "int8"; "fp8" (8-bit floats, 4 bits of exponent and 3 of mantissa);
            "mxfp4" or "mxfp8" (4-bit and 8-bit floats, scales that are powers of two).
        group: how many input features share a scale: 8, 16, a multiple of 32, or 0 for all of a
            row; default: 32, and 128 with "fp8". "int6" takes no groups of 8.
        symmetric: False gives each group a zero of its own beside its scale (not for floats).
        activations: "int8" rounds rows to 8 bits, a scale for each 32 features, before they are
            multiplied: faster where the CPU has VNNI, and less exact.
        linears: whether `torch.nn.Linear` layers are quantized, too.

    Returns:
        the number of layers, a `Changes`: its `summary()` lists them with their formats, and
        those that stay as they are with the reason. If a layer cannot be quantized, a warning
        gives the reason as well.

    Raises:
        ValueError: for a format, a group or activations that are none of these, or a weight that
            is not finite; layers before it stay quantized.

    >>> layer = moe_mlir.nn.MoELayer(moe_mlir.nn.SMoE(64, 8, 2), d_hidden=128)
    >>> moe_mlir.quantize(layer, "int4")
    1
    >>> layer.w_in
    QuantizedWeight([8, 128, 64], int4, group=32)
    """
    require_module(model)
    rounding = Rounding.of(_check, format, group, symmetric, activations)
    give_back(model)
    tally = Tally("quantized", warn_user)
    _replace_experts(model, rounding, tally)
    if linears:
        _replace_linears(model, rounding, tally)
    return tally.changes()


class QuantizedLinear(torch.nn.Linear):
    """A linear layer with a quantized weight; `quantize` turns a torch.nn.Linear into it."""

    weight: QuantizedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return quantized_linear(input, weight.codes, weight.scales, weight.zeros, self.bias,
                                self.out_features, weight.quantization)

    def reset_parameters(self) -> None:
        raise RuntimeError("expected a weight that is not quantized, found codes; initialise a "
                           "layer before it is quantized")


def _replace_experts(model, of: Rounding, tally: Tally) -> None:
    layers = ModelLayers(model)
    for name, module in model.named_modules():
        if not is_experts(module) or _is_quantized(module, weight_names(module)):
            continue
        if reason := (layers.why_not_experts(module, any_implementation=True)
                      or _why_not(module, weight_names(module))):
            tally.keep(name, module, reason)
            continue
        activation = layer_activation(module)
        assert activation is not None
        transposed = getattr(module, "is_transposed", False)
        weights = [of(getattr(module, weight), transposed=transposed, halves=gate == "concatenated")
                   for weight, gate in zip(weight_names(module), (activation.gate, "none"))]
        keep_activation(module, activation)
        for name_of_weight, weight in zip(weight_names(module), weights):
            _set(module, name_of_weight, weight)
        run_by_kernels(module)
        tally.change(name, module, weights[0].description)


def _replace_linears(model, of: Rounding, tally: Tally) -> None:
    layers = ModelLayers(model)
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear:
            continue
        if is_of_router(name) or layers.is_trained_by_peft(module):
            tally.keep(name, module, OF_ROUTER if is_of_router(name) else TRAINED, silently=True)
            continue
        if reason := (layers.why_not_linear(module, may_be_tied=True)
                      or _why_not(module, ["weight"])):
            tally.keep(name, module, reason)
            continue
        weight = of(module.weight, transposed=False, halves=False)
        if layers.is_tied(module):
            untie(model, f"{name}.weight")
        module.__class__ = QuantizedLinear
        _set(module, "weight", weight)
        tally.change(name, module, weight.description)


def _set(module, name, weight):
    module._parameters.pop(name, None)
    setattr(module, name, weight)


def _is_quantized(module, names) -> bool:
    return all(isinstance(getattr(module, name), QuantizedWeight) for name in names)


def _why_not(module, names) -> str:
    if any(isinstance(getattr(module, name), Panels) for name in names):
        return "its weights are packed; call moe_mlir.unpack_experts(model) and unpack_linears first"
    return ""


# ---- weights that were released as codes ------------------------------------------------


def from_pretrained(
    name_or_path: str, *, activations: Literal["none", "int8"] = "none", model_class: Any = None,
    **options: Any,
) -> torch.nn.Module:
    """A model of transformers from a checkpoint that was released in 4 or 8 bits, as it is stored.

    The weights of experts and linear layers stay the checkpoint's codes, in the order in which
    kernels read them: the same numbers as of the weights that transformers makes of them in
    float32, in a quarter or a half of the memory of bfloat16. What is not quantized in the
    checkpoint, transformers loads.

    Args:
        name_or_path: a folder, or a name on the Hub; or the path of a GGUF file.
        activations: "int8" rounds rows to 8 bits before they are multiplied, as `quantize` does.
        model_class: a class of transformers; default: the causal language model of the
            configuration.
        options: for its `from_pretrained`, such as `dtype` and `attn_implementation`; `gguf_file`
            names a GGUF file of the folder or repository.

    Returns:
        the model, in evaluation mode. Of a checkpoint that is not quantized, what `from_pretrained`
        of transformers returns. If a weight has no kernel, a warning gives the reason, and it is
        loaded as floats.

    Raises:
        ValueError: for a checkpoint that is quantized in another way than MXFP4 (gpt-oss), FP8 in
            blocks (DeepSeek, Qwen), MXFP8, GPTQ, AWQ or compressed-tensors, or whose codes are not
            finite; for a GGUF file that is a part, or whose architecture transformers does not take
            as it is; for a quantized model that was saved by its own `save_pretrained`.
        FileNotFoundError: for a checkpoint without safetensors files, or without the GGUF file.
        ImportError: for a GGUF file without the package gguf.
    """
    Checker("from_pretrained").choice("activations", activations, ROUNDINGS)

    def replace(module, name, shape, dtype, quantization, read):
        if activations != "none":
            quantization = quantization._replace(activations=activations)
        _set_codes(module, name, shape, dtype, quantization, read)
    return load(name_or_path, replace, _why_not_codes, model_class, options)


def save_pretrained(model: torch.nn.Module, folder: str, **options: Any) -> None:
    """Writes a quantized model of transformers to a folder, which `from_pretrained` reads.

    The files are those of the model's own `save_pretrained`, with the codes in the place of the
    weights; a CPU with other vectors reads them, too.

    Args:
        model: a model of transformers that `quantize` or `from_pretrained` made.
        folder: where to; made if there is none.
        options: for the model's `save_pretrained`, such as `max_shard_size`.

    Raises:
        ValueError: for a model without quantized weights.
    """
    save(model, folder, options)


def _why_not_codes(model, layer, name) -> str:
    """Why a layer's weight, of a model without weights, cannot be codes; empty if it can."""
    module, layers = model.get_submodule(layer), ModelLayers(model)
    if is_experts(module) and name in weight_names(module):
        return layers.why_no_kernel(module)
    if type(module) is not torch.nn.Linear or name != "weight" or is_of_router(layer):
        return f"no kernel reads codes of a {type(module).__name__}"
    if layers.is_read_elsewhere(module):
        return "a module around it reads its weight without calling it"
    return ""


def _set_codes(
    module, name, shape, dtype, quantization, read: Callable[[bool], Codes],
) -> None:
    """Gives a layer, whose weights were taken out, one of this shape."""
    transposed = halves = False
    if type(module) is torch.nn.Linear:
        module.__class__ = QuantizedLinear
    else:
        activation = layer_activation(module)
        assert activation is not None
        keep_activation(module, activation)
        transposed = getattr(module, "is_transposed", False)
        halves = activation.gate == "concatenated" and name == weight_names(module)[0]
        run_by_kernels(module)
    codes, *of_groups = read(halves)
    flat = [None if each is None else each.reshape(-1, *each.shape[-2:]) for each in of_groups]
    if not is_packed(codes):
        codes = codes.reshape(-1, *codes.shape[-2:])
    _set(module, name, QuantizedWeight(shape, dtype, quantization, codes, *flat,
                                       transposed=transposed, halves=halves))


__all__ = ["QuantizedLinear", "QuantizedWeight", "from_pretrained", "quantize", "save_pretrained"]
