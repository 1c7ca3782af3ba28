"""Operators of torch that its own exporter to ONNX has no translation for."""

from __future__ import annotations

from typing import Any

import torch
from onnxscript import opset18 as op


def _sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False):
    """`TopK` of all: of equal elements the earlier one comes first, in both directions."""
    size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
    return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)


TRANSLATIONS = {torch.ops.aten.sort.stable: _sort_stable}
