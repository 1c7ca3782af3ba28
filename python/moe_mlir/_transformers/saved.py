"""A quantized model of transformers as a folder that `moe_mlir.from_pretrained` reads.

The files are those of `save_pretrained`, with codes, scales and zeros in the place of weights, in
panels; `quantization_config` of config.json says what each weight is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..experts.quantized_weight import QuantizedWeight
from ..ops._quantized import Quantization, unpack_codes, unpack_scales
from .released_formats import Codes

# transformers refuses a configuration without a method; one that it does not know it ignores.
MADE_BY = "moe_mlir.save_pretrained"


def save(model, folder: str, options: dict[str, Any]) -> None:
    weights = {name: _describe(weight) for name, weight in model.named_modules()
               if isinstance(weight, QuantizedWeight)}
    if not weights:
        raise ValueError("expected a model with quantized weights, found none; call "
                         "moe_mlir.quantize first, or save it by its own save_pretrained")
    model.config.quantization_config = {"made_by": MADE_BY, "weights": weights}
    try:
        # By the names of the model: transformers would cut experts apart.
        model.save_pretrained(folder, save_original_format=False, **options)
    finally:
        del model.config.quantization_config


def _describe(weight: QuantizedWeight) -> dict[str, Any]:
    return {**weight.quantization._asdict(), "shape": list(weight.shape),
            "transposed": weight.transposed, "halves": weight.halves}


class SavedTarget(NamedTuple):
    """A parameter of the model, and what the configuration says of it."""

    name: str
    shape: tuple[int, ...]
    described: Mapping[str, Any]


class SavedWeights:
    """Which parameters of a model are codes in such a folder, and what they are."""

    def __init__(self, config: Mapping[str, Any], checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known = set(checkpoint.names())
        self.targets = [SavedTarget(name, tuple(described["shape"]), described)
                        for name, described in config["weights"].items()]
        for target in self.targets:
            if missing := {f"{target.name}.codes", f"{target.name}.scales"} - self._known:
                raise ValueError(f"expected {min(missing)!r} in the checkpoint, found none")

    def quantization(self, target: SavedTarget) -> Quantization:
        return Quantization(*(target.described[field] for field in Quantization._fields))

    def other_tensors(self) -> Mapping[str, torch.Tensor]:
        """What is not codes, by the model's names."""
        parts = {name for target in self.targets for name in self._parts(target)}
        return {name: self._checkpoint.tensor(name) for name in self._known - parts}

    def _parts(self, target) -> Iterable[str]:
        return [name for part in ("codes", "scales", "zeros")
                if (name := f"{target.name}.{part}") in self._known]

    def read(self, target: SavedTarget, model, halves: bool) -> Codes:
        """The codes of a parameter, `[.., out, in]`."""
        described = target.described
        out, width = target.shape[-2:] if not described["transposed"] else target.shape[:-3:-1]
        codes, *of_groups = map(self._checkpoint.tensor, self._parts(target))
        halves = described["halves"]
        return Codes(unpack_codes(codes, out, width, described["format"], halves=halves),
                     *(unpack_scales(each, out, halves=halves) for each in of_groups))
