"""Models with our routers as AOTInductor packages, for C++ programs without Python.

    from moe_mlir.frontends import aot

    program = torch.export.export(model, (x,), dynamic_shapes=...)
    aot.package(program, "model.pt2")

writes `model.pt2`, which torch's AOTIModelPackageLoader runs, and beside it
`model.kernels`, an artifact with the kernels of the routing ops in it, which
`moe::torch_ops::loadKernels` of libmoe_torch loads. docs/Deploying.md has the
C++ program.
"""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._support.tools import find_tool
from ..raising.raise_routing import raise_routing
from ..sim.simulation import intercept

if TYPE_CHECKING:
    from ..ops._kernel import Kernel

# What libmoe_torch registers (lib/TorchOps/Ops.cpp).
_OPS = ("grouped_topk", "router_logits", "topk_renorm")


def package(program: torch.export.ExportedProgram, path: str | os.PathLike[str]) -> Path:
    """Packages a program, its recognised routers as our ops; returns the kernels' folder.

    Args:
        program: a torch.export.ExportedProgram; its graph is changed.
        path: where the package goes, `.pt2`.

    Raises:
        ValueError: the program has a routing op that libmoe_torch has not.
    """
    path = Path(path)
    if not isinstance(program, torch.export.ExportedProgram):
        raise TypeError("aot.package: expected a torch.export.ExportedProgram, found "
                        f"{type(program).__name__}; torch.export.export makes one")
    if path.suffix != ".pt2":
        raise ValueError(f"aot.package: expected a path that ends in .pt2, found '{path}'")
    raise_routing(program.graph_module)
    kernels = find_kernels(program)
    folder = path.with_suffix(".kernels")
    if kernels:
        _write_artifact(kernels, folder)
    # Whole or not at all: what was there stays until the new package is complete.
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".package-") as beside:
        whole = Path(beside) / path.name
        from .._torch.inductor import aoti_compile_and_package

        aoti_compile_and_package(program, package_path=os.fspath(whole))
        os.replace(whole, path)
    return folder


def find_kernels(program: torch.export.ExportedProgram) -> dict[str, Kernel]:
    """The kernels that the routing ops of a program call, by the names they have in C++."""
    with intercept(_Recorder()) as recorder:
        for node in program.graph.nodes:
            if node.op == "call_function" and str(node.target).startswith("moe."):
                _record(node)
    return recorder.kernels


class _Recorder:
    """Takes the place of a simulation: notes the kernels instead of running them."""

    def __init__(self):
        self.kernels = {}

    def run(self, kernel, tensors):
        self.kernels[kernel_name(kernel)] = kernel


def _record(node):
    name = node.target._schema.name.removeprefix("moe::")
    if name not in _OPS:
        raise ValueError(f"aot.package: expected the routing ops {', '.join(_OPS)}, found "
                         f"'{name}'; run this model with moe-compile and moe-run instead")
    args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), _example)
    node.target(*args, **kwargs)


def _example(value):
    """Some tensor of a node's dtype and sizes; a size that is open has no part in a kernel."""
    if not isinstance(value, torch.fx.Node):
        return value
    like = value.meta["val"]
    return torch.zeros([d if isinstance(d, int) else 2 for d in like.shape], dtype=like.dtype)


def kernel_name(kernel: Kernel) -> str:
    """The name by which libmoe_torch looks for a kernel (lib/TorchOps/Kernels.h)."""
    from ..ops._kernel import ELEMENT_TYPES

    parts = [kernel.op, *(_attribute(text) for _, text in kernel.attributes)]
    for tensor in (*kernel.inputs, *kernel.results):
        dims = "".join(f"x{dim}" for dim in tensor.dims if isinstance(dim, int))
        parts.append(ELEMENT_TYPES[tensor.dtype] + dims)
    return "_".join(parts)


def _attribute(text):
    """An attribute's assembly as part of a name; a float by its bits."""
    value, _, kind = text.partition(" : ")
    if kind == "f64":
        return struct.pack(">d", float(value)).hex()
    return value.partition("<")[2].rstrip(">") or value


def _write_artifact(kernels, folder):
    """One artifact with all kernels, written by moe-compile."""
    tool = find_tool("moe-compile")
    if tool is None:
        raise FileNotFoundError("aot.package: expected moe-compile beside the package, found none; "
                                "install the wheel again, or build the source tree")
    texts = [kernel.text().replace(f"@{kernel.op}(", f"@{name}(", 1)
             for name, kernel in sorted(kernels.items())]
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "kernels.mlir"
        source.write_text("".join(texts))
        done = subprocess.run([tool, source, "-o", folder], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"aot.package: moe-compile failed: {done.stderr.strip()}")
