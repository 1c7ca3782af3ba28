"""The weights of a GGUF file, for a model of transformers: codes where there is a kernel.

transformers knows the architectures, and which tensor of a file is which weight of a model; its
processors put rows and experts in its own order. They are applied to the numbers of rows, as if
each were a row; then rows are read, decoded and packed, some at a time, where these numbers say.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._support.log import warn_user
from ..ops._quantized import (
    Quantization,
    dequantize_codes,
    empty_panels,
    pack_rows,
    rows_at_once,
    slices_of_rows,
)
from .gguf_blocks import BLOCK_TYPES
from .gguf_file import WORDS_OF_DESCRIPTION, GGUFFile, GGUFTensor
from .released_formats import Codes, as_narrow_as_exact

# Those of transformers that move rows of a weight, and change no number of it.
_PROCESSORS = ("TensorProcessor", "LlamaTensorProcessor", "Qwen2MoeTensorProcessor",
               "MiniMaxM2TensorProcessor", "Gemma2TensorProcessor")

_FLOATS = {"F16", "F32", "F64", "BF16"}


class GGUFTarget(NamedTuple):
    """A parameter of the model, the tensors of the file that it is made of, and their codes."""

    name: str
    shape: tuple[int, ...]
    sources: list[GGUFTensor]
    quantization: Quantization | None    # None: its types have no codes


def find_file(name_or_path: str, file: str | None) -> tuple[str, str]:
    """The folder or name on the Hub, and the file, also of a path to the file itself."""
    path = Path(name_or_path)
    if file is None and path.suffix == ".gguf":
        if path.is_file():
            return str(path.parent), path.name
        # The Hub would say that this is no name of a repository.
        if path.is_absolute() or path.parent.is_dir():
            raise FileNotFoundError(f"expected a GGUF file at {path}, found none")
    return name_or_path, file or ""


def _local_path(name_or_path: str, file: str) -> Path:
    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name_or_path, file))
    if not (folder / file).is_file():
        raise FileNotFoundError(f"expected {file} in {folder}, found none")
    return folder / file


def open_file(name_or_path: str, file: str) -> GGUFFile:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("expected the package gguf, which knows the types of GGUF files, found "
                          "none: pip install gguf") from error
    return GGUFFile(_local_path(name_or_path, file))


def read_config(file: GGUFFile) -> Any:
    """The configuration that transformers reads, with the width of experts, which it leaves out."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        file.write_description(Path(folder) / file.path.name)
        config = AutoConfig.from_pretrained(folder, gguf_file=file.path.name)
    config.name_or_path = str(file.path.parent)
    # Of some architectures transformers counts the words whatever a file says.
    if config.vocab_size == WORDS_OF_DESCRIPTION and file.words is not None:
        config.vocab_size = file.words
    width = file.value(f"{file.architecture}.expert_feed_forward_length")
    if width is not None and hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = width
    return config


class GGUFWeights:
    """Which parameters of a model are codes in a GGUF file, and what they are."""

    def __init__(self, file: GGUFFile, skeleton, why_not) -> None:
        from transformers import modeling_gguf_pytorch_utils as gguf_of_transformers

        if (parts := file.value("split.count", 1)) > 1:
            raise ValueError(f"expected a GGUF file that is whole, found a part of {parts} in "
                             f"{file.path.name}; merge them with llama-gguf-split --merge")
        architecture = file.architecture
        processor = gguf_of_transformers.TENSOR_PROCESSORS.get(
            architecture, gguf_of_transformers.TensorProcessor)
        if processor.__name__ not in _PROCESSORS:
            raise ValueError("expected a GGUF file of an architecture whose weights transformers "
                             f"takes as they are, found {architecture!r}; load it by transformers "
                             "and call moe_mlir.quantize")
        self._file = file
        self._processor = processor(config=skeleton.config.to_dict())
        self._names = gguf_of_transformers.get_gguf_hf_weights_map(skeleton, self._processor)
        found = self._find(file.tensors, skeleton)
        self._dtypes = {name: weight.dtype for name, weight in skeleton.state_dict().items()}
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
            types = sorted({source.type_name for source in target.sources})
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
        return {target.name: self._read_floats(target) for target in self._float_targets}

    def _read_floats(self, target: GGUFTarget) -> torch.Tensor:
        if any(len(source.shape) < 2 for source in target.sources):
            # Of vectors, processors change numbers as well.
            return self._process(target, [
                _floats(source, self._file.read(source, 0, source.rows)).view(source.shape)
                for source in target.sources])
        floats = torch.empty(target.shape, dtype=self._dtypes[target.name])
        at = 0
        for part in self._rows(target).split(rows_at_once(target.shape[-1])):
            for source, data in self._read(target, part):
                floats.view(-1, target.shape[-1])[at:at + len(data)] = _floats(source, data)
                at += len(data)
        return floats

    def read(self, target: GGUFTarget, model, halves: bool) -> Codes:
        """The codes of a parameter, in panels, and scales and zeros `[experts, out, u]`."""
        (out, width), experts = target.shape[-2:], math.prod(target.shape[:-2])
        format, _, _ = self.quantization(target)
        panels = empty_panels(experts, out, width, format)
        of_groups: list[torch.Tensor | None] = []
        for expert, (mine, numbers) in enumerate(
                zip(panels, self._rows(target).view(experts, out), strict=True)):
            for rows in slices_of_rows(out, width, halves=halves):
                codes, *others = self._codes(target, numbers[rows])
                pack_rows(codes, mine, rows.start, out, format, halves=halves)
                of_groups = of_groups or [
                    None if each is None else each.new_empty(experts, out, each.shape[-1])
                    for each in others]
                for whole, part in zip(of_groups, others, strict=True):
                    if whole is not None:
                        whole[expert, rows] = part
        return Codes(panels, *(None if each is None else as_narrow_as_exact(each)
                               for each in of_groups))

    def _codes(self, target, numbers) -> Codes:
        parts = [BLOCK_TYPES[source.type_name].weight(data)
                 for source, data in self._read(target, numbers)]
        return parts[0] if len(parts) == 1 else Codes(*(
            None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)))

    def _rows(self, target) -> torch.Tensor:
        """Which row of its sources, numbered through all of them, each row of a parameter is."""
        ends = _ends(target)
        numbers = self._process(target, [
            torch.arange(end - source.rows, end).view(*source.shape[:-1], 1)
            for source, end in zip(target.sources, ends, strict=True)])
        widths = {source.shape[-1] for source in target.sources}
        if numbers.shape[:-1] != target.shape[:-1] or widths != {target.shape[-1]}:
            raise ValueError(f"expected {target.name!r} to be {list(target.shape)}, found "
                             f"{[list(source.shape) for source in target.sources]} in the file")
        return numbers.reshape(-1)

    def _read(self, target, numbers):
        """The bytes of these rows in turn, with the tensor that they are of."""
        ends = _ends(target)
        which = torch.bucketize(numbers, torch.tensor(ends), right=True)
        sources, counts = torch.unique_consecutive(which, return_counts=True)
        for index, mine in zip(sources.tolist(), numbers.split(counts.tolist()), strict=True):
            source = target.sources[index]
            first, last = int(mine.min()), int(mine.max())
            data = self._file.read(source, first - (ends[index] - source.rows), last - first + 1)
            is_in_order = len(data) == len(mine) and bool((mine.diff() == 1).all())
            yield source, data if is_in_order else data[mine - first]

    def _process(self, target, tensors) -> torch.Tensor:
        """What transformers makes of these tensors, as of the weights."""
        made: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        for source, tensor in zip(target.sources, tensors, strict=True):
            result = self._processor.process(
                weights=tensor.numpy(), name=source.name, tensor_key_mapping=self._names,
                parsed_parameters=made)
            if result.name is not None:
                made["tensors"][target.name] = torch.from_numpy(result.weights.copy())
        return made["tensors"][target.name]


def _ends(target) -> list[int]:
    return list(itertools.accumulate(source.rows for source in target.sources))


def _floats(source, data) -> torch.Tensor:
    """Rows of floats of the bytes of rows, as the package gguf says what they are."""
    from gguf import GGMLQuantizationType, dequantize

    if source.type_name in BLOCK_TYPES and _is_exact(source.type_name):
        block_type = BLOCK_TYPES[source.type_name]
        codes, scales, _ = block_type.weight(data)
        return dequantize_codes(codes, scales, None, *block_type.quantization[:2])
    floats = dequantize(data.numpy(), GGMLQuantizationType[source.type_name])
    return torch.from_numpy(floats).view(-1, source.shape[-1])


@functools.cache
def _is_exact(type_name) -> bool:
    """Whether its weights are codes times scales, which is rounded once."""
    block_type = BLOCK_TYPES[type_name]
    _, _, zeros = block_type.weight(torch.zeros(1, block_type.bytes, dtype=torch.uint8))
    return zeros is None


def _quantization(tensors) -> Quantization | None:
    types = {BLOCK_TYPES.get(tensor.type_name) for tensor in tensors}
    block_type = types.pop()
    return block_type.quantization if block_type is not None and not types else None


def _is_embedding(skeleton, layer) -> bool:
    return isinstance(skeleton.get_submodule(layer), torch.nn.Embedding)
