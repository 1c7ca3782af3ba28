"""The way of an op's arguments from torch to the lowering: `moe explain --op NAME`.

A call leaves Python through torch's registry and then through text, so that no editor can follow
an argument. Here each is named on all its stations: the argument of the torch op, the operand or
attribute of the op in IR (ODS), and the lines of C++ that read that. The stations are read from the
source tree when they are asked for, so that no line number is ever old.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import packing as _registered  # noqa: F401  registers the ops of experts
from .._support.paths import PACKAGE

_LAYER = ("dispatch", "token_rows", "grouped_linear", "combine")
# The ops in IR of a torch op, where it is not one of the same name.
OPS_IN_IR = {
    "attention": ("softmax_mix",),
    "grouped_topk": ("topk_renorm",),
    "packed_linear": ("grouped_linear",),
    "quantized_linear": ("grouped_linear",),
    "run_experts": _LAYER,
    "run_quantized_experts": _LAYER,
}
# What decides the size or the type of a result, and is no operand.
SHAPE = "the shape of outs"
TYPE = "the type of outs"
# Argument of a torch op -> its names in IR, where they differ; of all ops, then of one.
NAMES: dict[str, tuple[str, ...]] = {
    "causal": ("visibility",), "divide_by": ("divisor",), "exclude_self": ("visibility",),
    "idx": ("indices",), "index_dtype": (TYPE,), "k": (SHAPE,), "num_experts": (SHAPE,),
    "window": ("visibility",),
}  # fmt: skip
NAMES_OF_OP: dict[tuple[str, str], tuple[str, ...]] = {
    ("attention", "k"): ("k",),
    ("attention", "mask"): ("key_mask", "query_mask"),
    ("attention_entropy", "k"): ("k",),
    ("attention_entropy", "mask"): ("key_mask", "query_mask"),
    ("attention_posterior", "k"): ("k",),
    ("attention_posterior", "mask"): ("key_mask",),
    ("grouped_topk", "bias"): ("select_bias",),
    ("packed_linear", "groups"): ("rows",),
    ("packed_linear", "out_features"): (SHAPE,),
    ("quantized_linear", "out_features"): (SHAPE,),
    ("run_quantized_experts", "format_out"): ("format",),
    ("run_quantized_experts", "group_out"): ("group",),
    ("run_quantized_experts", "hidden"): (SHAPE,),
    ("soft_dispatch", "m"): ("metric",),
}
# Both layers of experts have these, with "_in" and "_out" behind the name.
NAMES_OF_OP |= {
    (op, name + layer): (operand,)
    for op, operands in (
        ("run_experts", {"w": "w", "b": "bias"}),
        ("run_quantized_experts", {"w": "w", "b": "bias", "scales": "scales", "zeros": "zeros"}))
    for name, operand in operands.items() for layer in ("_in", "_out")
}


@dataclass(frozen=True)
class Station:
    """An operand or attribute of an op in IR, and the lines that read it (`file:line`).

    `readers` are in files that name the op's class. Templates and interfaces serve ops that they
    do not name: `same_name` are lines that read an argument of that name of any op.
    """

    op: str
    name: str
    readers: tuple[str, ...] = ()
    same_name: tuple[str, ...] = ()


@dataclass(frozen=True)
class Definition:
    """An op in IR: its class in C++, where it is defined, and the names of its arguments."""

    cpp: str
    place: str
    arguments: tuple[str, ...]


def source_tree() -> Path:
    """The root of the sources around the package.

    Raises:
        FileNotFoundError: the package is installed without them.
    """
    root = (PACKAGE / "__init__.py").resolve().parents[2]
    if not (root / "include" / "MoE").is_dir():
        raise FileNotFoundError("expected moe-mlir's source tree around the package, found an "
                                "installed one; run this in the build of a source tree")
    return root


def _wheel(name) -> Path:
    """The folder of a wheel that the source tree is built with."""
    return Path(importlib.import_module(name).__path__[0])


@functools.cache
def definitions() -> dict[str, Definition]:
    """Name -> definition of every op of the dialect, as TableGen reads them."""
    root = source_tree()
    folder = root / "include" / "MoE" / "Dialect" / "MoE" / "IR"
    tool = _wheel("llvm") / "bin" / "llvm-tblgen"
    done = subprocess.run(
        [tool, "-dump-json", "-I", root / "include", "-I", _wheel("mlir") / "include",
         folder / "MoEOps.td"], capture_output=True, text=True, check=True)
    records = json.loads(done.stdout)
    places = {match[1]: f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start()) + 1}"
              for path in sorted(folder.glob("*.td")) for text in [path.read_text()]
              for match in re.finditer(r"^def (MoE_\w+)", text, re.MULTILINE)}
    found = {}
    for name in records["!instanceof"]["Op"]:
        record = records[name]
        if record["opDialect"]["def"] == "MoE_Dialect":
            found[record["opName"]] = Definition(
                name.removeprefix("MoE_"), places[name],
                tuple(argument[1] for argument in record["arguments"]["args"]))
    return found


@functools.cache
def _sources() -> dict[str, str]:
    root = source_tree()
    return {str(path.relative_to(root)): path.read_text()
            for folder in ("lib", "include") for path in sorted((root / folder).rglob("*"))
            if path.suffix in (".cpp", ".h")}


def _station(op: str, name: str) -> Station:
    """Where the accessor of an argument is called."""
    accessor = "get" + "".join(part.capitalize() for part in name.split("_"))
    call = re.compile(rf"\b{accessor}(?:Attr|Mutable)?\(")
    cpp = re.compile(rf"\b{definitions()[op].cpp}\b")
    naming: list[str] = []
    others: list[str] = []
    for path, text in _sources().items():
        if accessor in text and (match := call.search(text)):
            line = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
            (naming if cpp.search(text) else others).append(line)
    # A verifier alone is not what the argument is for.
    is_lowered = any("/Dialect/MoE/IR/" not in line for line in naming)
    return Station(op, name, tuple(naming), () if is_lowered else tuple(others))


def names_in_ir(op: str, argument: str) -> tuple[str, ...]:
    """What an argument of a torch op is called in IR: names of ODS, `SHAPE` or `TYPE`."""
    return (NAMES_OF_OP.get((op, argument)) or NAMES.get(argument) or (argument,))


def arguments(op: str) -> dict[str, list[Station]]:
    """The stations of each argument of `torch.ops.moe.<op>`, in the order of its schema.

    Raises:
        ValueError: there is no such op.
    """
    overload = getattr(getattr(torch.ops.moe, op, None), "default", None)
    if overload is None or not (PACKAGE / "ops" / f"{op}.py").exists():  # or a mark of a trace
        files = [path.stem for path in (PACKAGE / "ops").glob("[!_]*.py")]
        near = difflib.get_close_matches(op, files, n=1, cutoff=0.4)
        raise ValueError(f"expected an op of torch.ops.moe, such as topk_renorm, found '{op}'"
                         + (f"; did you mean {near[0]}?" if near else ""))
    return {argument.name: list(_stations(op, argument.name))
            for argument in overload._schema.arguments}


def _stations(op, argument) -> Iterable[Station]:
    for name in names_in_ir(op, argument):
        for ir in OPS_IN_IR.get(op, (op,)):
            if name in (SHAPE, TYPE):
                yield Station(ir, name)
                break
            if name in definitions()[ir].arguments:
                yield _station(ir, name)


def describe(op: str, most: int = 4) -> str:
    """The page that `moe explain --op` prints; of the readers of an argument `most`."""
    ways = arguments(op)
    lines = [f"torch.ops.moe.{op} (python/moe_mlir/ops/{op}.py)"]
    lines += [f"  -> moe.{ir} ({definitions()[ir].place})" for ir in OPS_IN_IR.get(op, (op,))]
    for argument, stations in ways.items():
        lines.append(f"\n{argument}")
        for station in stations:
            lines.append(f"  moe.{station.op}: {station.name}")
            lines += _lines("read at", station.readers, most)
            lines += _lines("an argument of this name is read at", station.same_name, most)
    return "\n".join(lines)


def _lines(what, places, most):
    lines = [f"    {what} {place}" for place in places[:most]]
    return lines + ([f"    and in {len(places) - most} more files"] if len(places) > most else [])


__all__ = ["Definition", "Station", "arguments", "definitions", "describe", "names_in_ir"]
