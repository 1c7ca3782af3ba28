"""Loads a checkpoint of transformers whose weights are codes, without making floats of them.

transformers builds the model and loads what is not quantized. How names of a checkpoint become
names of a model, and how experts are stacked, its own conversions say: they are applied to codes,
then to scales and zeros, as if each were the weight.
"""

from __future__ import annotations

import copy
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._support.log import warn_user
from .._support.progress import Clock
from ..ops._check import Checker
from ..ops._quantized import Quantization, dequantize_codes
from . import saved
from .gguf import GGUFWeights, find_file, open_file, read_config
from .released_formats import FORMATS, Codes, ReleasedFormat

METHOD = "moe_mlir_codes"


def load(
    name_or_path: str, replace: Callable, why_not: Callable, model_class: Any,
    options: dict[str, Any],
) -> torch.nn.Module:
    """A model whose quantized weights were replaced.

    Args:
        name_or_path: as `from_pretrained` takes it.
        replace: called once for each weight, with the model's layer, the name of its weight, the
            weight's shape, dtype and quantization, and what reads its `Codes`, given whether its
            panels have halves.
        why_not: why a weight of a layer, given by the model without weights, the name of the layer
            and that of the weight, must be floats; empty if it may be codes.
        model_class: a class of transformers, or None for that of a causal language model.
        options: for `from_pretrained`.
    """
    import transformers

    name_or_path, gguf_file = find_file(name_or_path, options.pop("gguf_file", None))
    file = open_file(name_or_path, gguf_file) if gguf_file else None
    config = options.pop("config", None) or (
        read_config(file) if file else transformers.AutoConfig.from_pretrained(name_or_path))
    model_class = model_class or _causal_class(config)
    if file:
        skeleton = _skeleton(model_class, config, options.get("dtype"))
        weights: Any = GGUFWeights(file, skeleton, why_not)
    else:
        given = getattr(config, "quantization_config", None)
        if given is None:
            _check_has_weights(Path(name_or_path))
            return model_class.from_pretrained(name_or_path, config=config, **options)
        given = given if isinstance(given, dict) else given.to_dict()
        del config.quantization_config
        if given.get("made_by") == saved.MADE_BY:
            weights = saved.SavedWeights(given, _Checkpoint(name_or_path))
        else:
            weights = _Weights(_format(given), _Checkpoint(name_or_path),
                               _skeleton(model_class, config), why_not)
    config.quantization_config = _quantization_config([target.name for target in weights.targets])
    model = model_class.from_pretrained(
        None, config=config, state_dict=weights.other_tensors(), **options)
    with Clock("loading") as clock:
        for done, target in enumerate(weights.targets):
            clock.label = f"loading {done} of {len(weights.targets)} quantized weights"
            layer, _, name = target.name.rpartition(".")
            replace(model.get_submodule(layer), name, target.shape, model.dtype,
                    weights.quantization(target), functools.partial(weights.read, target, model))
    _set_generation_config(model, name_or_path)
    return model.eval()


def _check_has_weights(folder: Path) -> None:
    """transformers would draw at random what a quantized model's own save_pretrained left out."""
    try:
        names = set(_Checkpoint(str(folder)).names()) if folder.is_dir() else set()
    except FileNotFoundError:
        return  # in another format
    for name in sorted(names):
        weight = name.removesuffix(".codes")
        if weight != name and weight not in names and f"{weight}.scales" in names:
            raise ValueError(
                f"from_pretrained: expected config.json in {folder} to describe quantized weights such "
                f"as '{weight}', found nothing about them: a quantized model was saved by its own "
                "save_pretrained; quantize it again, and save it by moe_mlir.save_pretrained")


def _causal_class(config):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"expected a causal language model, found {type(config).__name__}; give "
                         "model_class")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _format(config: dict[str, Any]) -> ReleasedFormat:
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method")))
    if method not in FORMATS:
        raise ValueError(f"expected a checkpoint quantized by {', '.join(map(repr, FORMATS))}, found "
                         f"{method!r}; load it as floats and call moe_mlir.quantize")
    format = FORMATS[method](config)
    format.quantization.validate(Checker("from_pretrained"))
    return format


def _skeleton(model_class, config, dtype=None) -> torch.nn.Module:
    """The model without weights; their dtypes are those of a model of this dtype, if it is known."""
    default = torch.get_default_dtype()
    skeleton = _in_dtype(model_class, config, dtype if isinstance(dtype, torch.dtype) else default)
    # Some models keep some weights in float32.
    if skeleton.dtype != default and getattr(
            skeleton, "_get_dtype_plan", lambda dtype: "unknown")(dtype):
        return _in_dtype(model_class, config, default)
    return skeleton


def _in_dtype(model_class, config, dtype):
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    finally:
        torch.set_default_dtype(default)


def _set_generation_config(model, name_or_path):
    from transformers import GenerationConfig

    try:
        model.generation_config = GenerationConfig.from_pretrained(name_or_path)
    except OSError:
        pass  # without one the model's own stays


# ---- files ------------------------------------------------------------------------


class _Checkpoint:
    """The tensors of the safetensors files of a checkpoint, which stay mapped."""

    def __init__(self, name_or_path: str) -> None:
        from safetensors import safe_open

        folder = Path(name_or_path)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors"]))
        index = folder / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) \
            if index.exists() else ["model.safetensors"]
        if missing := [name for name in names if not (folder / name).exists()]:
            raise FileNotFoundError(f"expected {missing[0]} in {folder}, found none; save the "
                                    "checkpoint as safetensors")
        self._files: dict[str, Any] = {}
        for file in names:
            opened = safe_open(folder / file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def tensor(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)


# ---- weights ----------------------------------------------------------------------


class _Target(NamedTuple):
    """A parameter of the model, and what of the checkpoint it is made of."""

    name: str
    shape: tuple[int, ...]
    converter: Any  # of transformers; None where it is one weight of the checkpoint
    sources: list[str]
    pattern_of: dict[str, str]


class _Weights:
    """Which parameters of a model are codes, and what they are."""

    def __init__(self, format, checkpoint, skeleton, why_not) -> None:
        self._format, self._checkpoint = format, checkpoint
        self._parts = format.weights(checkpoint.names())
        found = _targets(self._parts, skeleton)
        kept = {target.name: reason for target in found
                if (reason := why_not(skeleton, *target.name.rpartition(".")[::2])
                    or _why_not_alone(skeleton, target, {each.name for each in found}))}
        self.targets = [target for target in found if target.name not in kept]
        self._floats = [name for target in found if target.name in kept for name in target.sources]
        for name, reason in kept.items():
            warn_user(f"{name!r} is loaded as floats: {reason}")

    def other_tensors(self) -> Mapping[str, torch.Tensor]:
        """What is not codes, by the checkpoint's names."""
        parts = {name for each in self._parts.values() for name in each}
        tensors = {name: self._checkpoint.tensor(name)
                   for name in self._checkpoint.names() if name not in parts}
        return tensors | {name: self._as_floats(name) for name in self._floats}

    def quantization(self, target: _Target) -> Quantization:
        return self._format.quantization

    def _as_floats(self, name):
        codes, scales, zeros = self._format.read(self._parts[name], self._checkpoint.tensor)
        format, group, _ = self._format.quantization
        floats = dequantize_codes(codes, scales, zeros, format, group)
        return floats.mT.contiguous() if self._format.is_transposed else floats

    def read(self, target: _Target, model, halves: bool) -> Codes:
        """The codes of a parameter, `[.., out, in]`."""
        read = [self._format.read(self._parts[name], self._checkpoint.tensor)
                for name in target.sources]
        if target.converter is None:
            return read[0]
        streams = [None if each[0] is None else _convert(target, list(each), model)
                   for each in zip(*read, strict=True)]
        # Where the model's weight is [in, out], the conversion transposes.
        if any(type(each).__name__ == "Transpose" for each in target.converter.operations):
            streams = [None if each is None else each.mT for each in streams]
        return Codes(*streams)


def _why_not_alone(skeleton, target, names) -> str:
    """Both weights of a layer of experts are codes, or neither."""
    layer = target.name.rpartition(".")[0]
    others = [name for name, weight in skeleton.get_submodule(layer).named_parameters(recurse=False)
              if weight.dim() == 3 and f"{layer}.{name}" not in names]
    return f"'{others[0]}' beside it is not quantized" if others else ""


def _targets(parts, skeleton) -> list[_Target]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(skeleton)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = skeleton.state_dict()
    sources: dict[str, dict[str, str]] = defaultdict(dict)
    for name in sorted(parts, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, skeleton.base_model_prefix, state)
        if target not in state:
            raise ValueError(f"expected {name!r} to be a weight of {type(skeleton).__name__}, found "
                             f"no {target!r} in it")
        sources[target][name] = pattern or ""
    found = []
    for target, pattern_of in sources.items():
        pattern = next(iter(pattern_of.values()))
        converter = by_pattern[pattern] if pattern else None
        found.append(_Target(target, tuple(state[target].shape), converter, list(pattern_of),
                             pattern_of))
    return found


def _convert(target, tensors, model):
    """What transformers makes of these tensors, as of the weights."""
    converter = copy.deepcopy(target.converter)
    for name, tensor in zip(target.sources, tensors, strict=True):
        # It asks for functions, or for what a thread has loaded.
        converter.add_tensor(target.name, name, target.pattern_of[name],
                             lambda tensor=tensor: tensor)
    result = converter.convert(target.name, model=model, config=model.config)[target.name]
    return result[0] if isinstance(result, list) else result


# ---- the model is built without these weights ------------------------------------------


def _quantization_config(names):
    """Has transformers take the weights out of a model before it makes room for them."""
    from transformers.quantizers.auto import (
        AUTO_QUANTIZER_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if METHOD not in AUTO_QUANTIZER_MAPPING:
        @register_quantization_config(METHOD)
        class CodesConfig(QuantizationConfigMixin):
            def __init__(self, names=()):
                self.quant_method, self.names = METHOD, names

            def get(self, name, default=None):
                return getattr(self, name, default)

        @register_quantizer(METHOD)
        class CodesQuantizer(HfQuantizer):
            def _process_model_before_weight_loading(self, model, **options):
                for whole_name in self.quantization_config.names:
                    layer, _, name = whole_name.rpartition(".")
                    module = model.get_submodule(layer)
                    del module._parameters[name]
                    module._is_hf_initialized = True

            def postprocess_model(self, model, **options):
                self.remove_quantization_config(model)

            def is_serializable(self):
                return False

            @property
            def is_trainable(self):
                return False

    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD](names)
