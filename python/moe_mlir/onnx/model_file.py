"""moe_mlir.onnx.export: a model as an ONNX file."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._support.log import warn_user
from ..frontends.export import check_inputs
from ..frontends.trace_errors import TraceFailed
from ..nn import MoELayer
from ..packing import give_back
from ..weights.model_layers import is_experts
from .layers import Weights, check_layers
from .traced import PREFIX, Program, program_of

if TYPE_CHECKING:
    import onnx_ir as ir

# A file of protocol buffers has at most 2 GiB; what is not weights takes some of it.
_MOST_INSIDE = 1_900_000_000


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic: bool = True,
    external_data: bool | None = None,
    tanh_gelu: bool = False,
) -> int:
    """Writes a model with layers of experts as an ONNX file for onnxruntime.

    Each layer of experts is one node `com.microsoft.MoE`, or `com.microsoft.QMoE` where
    `moe_mlir.quantize` rounded its weights; linear layers that it rounded are nodes
    `com.microsoft.MatMulNBits`. All else, routers too, are standard operators. A node is given
    scores whose softmax has the model's gates: experts and gates are those of the model, of whatever
    kind its router is. Of equal scores that of the lower index is chosen.

    Args:
        model: a module in evaluation mode whose weights are float32 or quantized: a model of
            transformers, or one with `nn.MoELayer` or `run_experts` in it. Packed weights are
            refused; those that `moe_mlir.compile` packed are given back.
        args: example inputs, as a tuple.
        path: where the file goes; it ends in `.onnx`.
        kwargs: example keyword inputs; those that are not tensors are constants. A model that makes
            a cache is written without it.
        dynamic: batch sizes and numbers of tokens stay open: all dims of integer and bool
            inputs, and all but the last of others. False: the file takes inputs of the
            example's sizes.
        external_data: whether weights go to a file `path.data` beside the model; default: if
            they are too large for one file (2 GB).
        tanh_gelu: writes the gelu of tanh for that of erf, as `nn.MoELayer` has it, which
            onnxruntime's nodes do not know; hidden features differ by up to 5e-4.

    Returns:
        the number of layers of experts.

    Raises:
        ValueError: the model has no layers of experts, or they compute what no node of onnxruntime
            does (the message names the layers and the reasons); or the path has another suffix.
            Nothing is written.
        TraceFailed: torch.export cannot trace the model.
        ImportError: the packages onnx and onnxscript are not installed.

    >>> layer = moe_mlir.nn.MoELayer(moe_mlir.nn.SMoE(16, 8, 2), d_hidden=32).eval()
    >>> moe_mlir.onnx.export(layer, (torch.randn(2, 5, 16),), "layer.onnx", tanh_gelu=True)
    1
    """
    check_inputs(model, args, kwargs)
    path = _checked(path)
    require_packages()
    give_back(model)
    with _experts_as_ops(model):
        traced = program_of(model, args, kwargs, dynamic)
    weights = Weights.of(traced.program, PREFIX)
    count = check_layers(traced.program, weights, tanh_gelu=tanh_gelu, with_capacity=[
        name for name, module in model.named_modules()
        if isinstance(module, MoELayer) and module.capacity_factor is not None])
    file = _to_onnx(traced.program, tanh_gelu)
    sizes = _name_ends(file, traced)
    if traced.conditions:
        asked = ", ".join(_renamed(text, sizes) for text in traced.conditions)
        warn_user(f"onnx.export: {type(model).__name__} takes another way through its code unless "
                  f"{asked}: the file is for such sizes")
    _save(file, path, external_data)
    return count


def require_packages() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"onnx.export: expected the packages onnx and onnxscript, found no "
                          f"{' and no '.join(missing)}; pip install onnx onnxscript")


def _checked(path) -> Path:
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"onnx.export: expected a path that ends in .onnx, found '{path}'")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"onnx.export: expected a folder '{path.absolute().parent}', "
                                "found none")
    return path


@contextlib.contextmanager
def _experts_as_ops(model) -> Iterator[None]:
    """Layers of transformers run by our ops, which a trace keeps whole."""
    layers = [m for m in model.modules() if is_experts(m) and type(m) is not MoELayer]
    if layers:
        from .._transformers import experts_interface  # noqa: F401  registers "moe"
    configs = {id(m.config): (m.config, m.config._experts_implementation) for m in layers}
    for config, _ in configs.values():
        config._experts_implementation = "moe"
    try:
        yield
    finally:
        for config, before in configs.values():
            config._experts_implementation = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says of itself, such as packages that it does not find."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _to_onnx(program, tanh_gelu) -> ir.Model:
    from .arranged_weights import arrange_weights
    from .nodes import decompositions
    from .translations import TRANSLATIONS

    with _quiet(), torch.no_grad():
        program = program.run_decompositions(decompositions(tanh_gelu=tanh_gelu))
        try:
            file = torch.onnx.export(program, dynamo=True, verbose=False,
                                     custom_translation_table=TRANSLATIONS).model
        except torch.onnx.errors.OnnxExporterError as error:
            raise ValueError(f"onnx.export: torch.onnx cannot write what is around the experts: "
                             f"{_first_cause(error)}") from error
    arrange_weights(file)
    return file


def _first_cause(error: BaseException) -> str:
    """What an exporter's error began with, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# ---- names --------------------------------------------------------------------------------------


def _name_ends(file: ir.Model, traced: Program) -> dict[str, str]:
    """Gives inputs, outputs, weights and open sizes the names that users know; returns the last."""
    graph = file.graph
    taken = set(graph.initializers)
    for value in graph.inputs:
        value.name = _free(traced.inputs.get(value.name, value.name), taken)
    for value, name in zip(graph.outputs, traced.outputs, strict=True):
        value.name = _free(name, taken)
    for name, value in list(graph.initializers.items()):
        value.name = name.removeprefix(PREFIX)
    return _name_sizes(graph)


def _free(name, taken):
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _name_sizes(graph) -> dict[str, str]:
    """Symbols of torch, such as s77, by the inputs whose sizes they are."""
    import onnx_ir as ir

    names: dict[str, str] = {}
    for value in graph.inputs:
        for place, size in enumerate(value.shape or ()):
            text = str(getattr(size, "value", size))
            if text.isidentifier() and text not in names:
                usual = _usual_name(value, place)
                names[text] = f"{value.name}_{place}" if usual in names.values() else usual
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        for place, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                text = _renamed(str(size.value), names)
                value.shape[place] = int(text) if text.isdigit() else ir.SymbolicDim(text)
    return names


def _usual_name(value, place) -> str:
    """Tensors of a cache have their tokens at the last place but one."""
    if place == 0:
        return "batch"
    if value.dtype.is_integer():
        return "tokens"
    return "past" if place == len(value.shape) - 2 and place > 1 else f"{value.name}_{place}"


def _renamed(text, names) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), text)


# ---- the file -----------------------------------------------------------------------------------


def _save(file: ir.Model, path: Path, external_data: bool | None) -> None:
    """Whole or not at all: what was there stays until the new file is complete."""
    import onnx_ir as ir

    size = sum(value.const_value.nbytes for value in file.graph.initializers.values())
    outside = size > _MOST_INSIDE if external_data is None else external_data
    if not outside and size > _MOST_INSIDE:
        raise ValueError(f"onnx.export: expected at most 2 GB of weights in one file, found "
                         f"{size / 1e9:.1f} GB; leave out external_data")
    data = f"{path.name}.data"
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".onnx-") as beside:
        whole = Path(beside) / path.name
        ir.save(file, whole, external_data=data if outside else None)
        # The weights first: a model is never there without them.
        if (Path(beside) / data).exists():
            os.replace(Path(beside) / data, path.with_name(data))
        os.replace(whole, path)


__all__ = ["TraceFailed", "export"]
