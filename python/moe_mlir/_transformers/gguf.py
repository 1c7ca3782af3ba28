"""The weights of a GGUF file, for a model of transformers: codes where there is a kernel.

transformers knows the architectures, and which tensor of a file is which weight of a model; its
processors put rows and experts in its own order. They are applied to codes, then to scales and
zeros, as if each were the weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._support.log import warn_user
from ..ops._quantized import Quantization
from .gguf_blocks import BLOCK_TYPES
from .released_formats import Codes, as_narrow_as_exact

# Those of transformers that move rows of a weight, and change no number of it.
_PROCESSORS = ("TensorProcessor", "LlamaTensorProcessor", "Qwen2MoeTensorProcessor",
               "MiniMaxM2TensorProcessor", "Gemma2TensorProcessor")


_BYTES = (torch.uint8, torch.int8)
_FLOATS = {"F16", "F32", "F64", "BF16"}


class GGUFTarget(NamedTuple):
    """A parameter of the model, the tensors of the file that it is made of, and their codes."""

    name: str
    shape: tuple[int, ...]
    sources: list[Any]
    quantization: Quantization | None    # None: its types have no codes


def find_file(name_or_path: str, file: str | None) -> tuple[str, str]:
    """The folder or name on the Hub, and the file, also of a path to the file itself."""
    path = Path(name_or_path)
    if file is None and path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.name
    return name_or_path, file or ""


def _local_path(name_or_path: str, file: str) -> Path:
    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name_or_path, file))
    if not (folder / file).is_file():
        raise FileNotFoundError(f"expected {file} in {folder}, found none")
    return folder / file


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError("expected the package gguf, which reads GGUF files, found none: pip "
                          "install gguf") from error
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"expected a GGUF file that is whole, found {path}: {error}") from error


def read_config(name_or_path: str, file: str) -> Any:
    """The configuration that transformers reads, with the width of experts, which it leaves out."""
    from transformers import AutoConfig

    fields = _open(_local_path(name_or_path, file)).fields
    config = AutoConfig.from_pretrained(name_or_path, gguf_file=file)
    architecture = fields["general.architecture"].contents()
    width = fields.get(f"{architecture}.expert_feed_forward_length")
    if width is not None and hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = width.contents()
    return config


class GGUFWeights:
    """Which parameters of a model are codes in a GGUF file, and what they are."""

    def __init__(self, name_or_path: str, file: str, skeleton, why_not) -> None:
        from transformers import modeling_gguf_pytorch_utils as gguf_of_transformers

        path = _local_path(name_or_path, file)
        reader = _open(path)
        if (split := reader.fields.get("split.count")) and split.contents() > 1:
            raise ValueError(f"expected a GGUF file that is whole, found a part of {split.contents()} "
                             f"in {file}; merge them with llama-gguf-split --merge")
        architecture = reader.fields["general.architecture"].contents()
        processor = gguf_of_transformers.TENSOR_PROCESSORS.get(
            architecture, gguf_of_transformers.TensorProcessor)
        if processor.__name__ not in _PROCESSORS:
            raise ValueError("expected a GGUF file of an architecture whose weights transformers "
                             f"takes as they are, found {architecture!r}; load it by transformers "
                             "and call moe_mlir.quantize")
        self._processor = processor(config=skeleton.config.to_dict())
        self._names = gguf_of_transformers.get_gguf_hf_weights_map(skeleton, self._processor)
        found = self._find(reader.tensors, skeleton)
        floats = self._floats(found, skeleton, why_not)
        self.targets = [target for target in found if target.name not in floats]
        self._float_targets = [target for target in found if target.name in floats]

    def _find(self, tensors, skeleton) -> list[GGUFTarget]:
        state, sources = skeleton.state_dict(), defaultdict(list)
        for tensor in tensors:
            # Experts are parameters without the suffix.
            name = self._names.get(tensor.name) or self._names.get(
                tensor.name.removesuffix(".weight"))
            if name in state:
                sources[name].append(tensor)
        # transformers would make random numbers of what is missing.
        missing = state.keys() - sources.keys() - set(skeleton.all_tied_weights_keys or ())
        for tensor_name, name in self._names.items():
            if name in state and state[name].dim() == 3 and not any(
                    each.name.removesuffix(".weight") == tensor_name for each in sources[name]):
                missing.add(name)
        if missing:
            raise ValueError(f"expected a GGUF file with all weights of {type(skeleton).__name__}, "
                             f"found no tensor for {len(missing)} of them, such as "
                             f"{min(missing)!r}; transformers reads another model from this file")
        return [GGUFTarget(name, tuple(state[name].shape), found, _quantization(found))
                for name, found in sources.items()]

    @staticmethod
    def _floats(found, skeleton, why_not) -> set[str]:
        """The names of those that are floats; says why where their types have codes."""
        floats = {target.name for target in found if target.quantization is None}
        for target in found:
            layer, _, name = target.name.rpartition(".")
            types = sorted({source.tensor_type.name for source in target.sources})
            if target.quantization is None and not _FLOATS.issuperset(types) \
                    and not _is_embedding(skeleton, layer):
                warn_user(f"{target.name!r} is loaded as floats: no kernel reads "
                          f"{' and '.join(types)}")
            if target.name not in floats and (reason := why_not(skeleton, layer, name)):
                floats.add(target.name)
                if len(target.shape) > 1 and not _is_embedding(skeleton, layer):
                    warn_user(f"{target.name!r} is loaded as floats: {reason}")
        # Both weights of a layer of experts are codes, or neither.
        layers = {name.rpartition(".")[0] for name in floats}
        for target in found:
            layer = target.name.rpartition(".")[0]
            if len(target.shape) == 3 and layer in layers and target.name not in floats:
                floats.add(target.name)
                warn_user(f"{target.name!r} is loaded as floats: the other weight of its experts "
                          "is not of one type that has codes")
        return floats

    def quantization(self, target: GGUFTarget) -> Quantization:
        assert target.quantization is not None
        return target.quantization

    def other_tensors(self) -> Mapping[str, torch.Tensor]:
        """What is not codes, by the model's names, as floats."""
        from gguf import dequantize

        return {target.name: self._process(
            target, [dequantize(source.data, source.tensor_type) for source in target.sources])
            for target in self._float_targets}

    def read(self, target: GGUFTarget, model) -> Codes:
        """The codes of a parameter, `[.., out, in]`."""
        read = []
        for source in target.sources:
            block_type = BLOCK_TYPES[source.tensor_type.name]
            data = torch.from_numpy(source.data.copy())
            read.append(block_type.weight(data))
        codes, scales, zeros = (
            None if each[0] is None else self._process(
                target, [part if part.dtype in _BYTES else part.float() for part in each])
            for each in zip(*read, strict=True))
        return Codes(codes, as_narrow_as_exact(scales),
                     None if zeros is None else as_narrow_as_exact(zeros))

    def _process(self, target, tensors) -> torch.Tensor:
        """What transformers makes of these tensors, as of the weights."""
        made: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        for source, tensor in zip(target.sources, tensors, strict=True):
            result = self._processor.process(
                weights=tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor,
                name=source.name, tensor_key_mapping=self._names, parsed_parameters=made)
            if result.name is not None:
                made["tensors"][target.name] = torch.from_numpy(result.weights.copy())
        return made["tensors"][target.name]


def _quantization(tensors) -> Quantization | None:
    types = {BLOCK_TYPES.get(tensor.tensor_type.name) for tensor in tensors}
    block_type = types.pop()
    return block_type.quantization if block_type is not None and not types else None


def _is_embedding(skeleton, layer) -> bool:
    return isinstance(skeleton.get_submodule(layer), torch.nn.Embedding)
