"""`moe explain`: the routers of a model, or the way of an op's arguments to the lowering."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._support.command_line import Parser, add_json, print_json
from ..frontends.explain import explain
from ..raising.site import RouterMatch


class _Target(NamedTuple):
    model: Any
    args: tuple = ()
    kwargs: Mapping[str, Any] | None = None


def parser() -> Parser:
    parser = Parser("explain", "Lists every top-k of a model: how it computes gates as a router, or "
                    "why it is not recognised.", examples=(
                        "moe explain model.pt2          a program that torch.export.save wrote",
                        "moe explain model.py:make      make() returns (model, args) or "
                        "(model, args, kwargs)",
                        "moe explain checkpoint/        a folder with the config.json of a "
                        "transformers model; reads no weights",
                        "moe explain Qwen3-MoE --json   a family of `moe models --list`",
                        "moe explain --op topk_renorm   where each argument of a torch op goes"))
    parser.add_argument("model", nargs="?",
                        help="a .pt2 file, FILE.py:FUNCTION, a folder, or a family")
    parser.add_argument("--op", metavar="NAME",
                        help="of an op of torch.ops.moe: what each argument is called in IR, and "
                        "which lines of C++ read it (in a source tree)")
    add_json(parser)
    return parser


def _of_function(text: str) -> _Target:
    file, _, name = text.rpartition(":")
    if not os.path.isfile(file):
        raise ValueError(f"expected a Python file before ':', found no file '{file}'")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(f"expected a function '{name}' in {file}, found none")
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"expected {name}() to return (model, args) or (model, args, kwargs), "
                         f"found {type(made).__name__}")
    return _Target(*made)


def _of_checkpoint(folder: str) -> _Target:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        return _Target(model, (), {"input_ids": torch.zeros(2, 12, dtype=torch.int64),
                                   "use_cache": False})


def _of_family(name: str) -> _Target:
    try:
        from moe_mlir_bench.models import FAMILIES
    except ModuleNotFoundError as error:
        if error.name != "moe_mlir_bench":
            raise
        raise ValueError("expected a .pt2 file, FILE.py:FUNCTION, or a folder with a config.json, "
                         f"found '{name}'; families are named by the package moe_mlir_bench: "
                         "`pip install moe-mlir-bench`") from None
    if name not in FAMILIES:
        raise ValueError("expected a .pt2 file, FILE.py:FUNCTION, a folder with a config.json, or "
                         f"a family ({', '.join(FAMILIES)}), found '{name}'")
    family = FAMILIES[name]
    return _Target(family.build(), (), family.example())


def _find(text: str) -> _Target:
    if text.endswith(".pt2"):
        if not os.path.isfile(text):
            raise ValueError(f"expected an exported program, found no file '{text}'")
        return _Target(torch.export.load(text))
    if ".py:" in text:
        return _of_function(text)
    if text.endswith(".py"):
        raise ValueError("expected the name of a function behind the file, which returns (model, args): "
                         f"{text}:make; found '{text}'")
    if os.path.isdir(text):
        if not (Path(text) / "config.json").exists():
            raise ValueError(f"expected a config.json in the folder {text}, found none")
        return _of_checkpoint(text)
    return _of_family(text)


def _equal_together(found: Sequence[RouterMatch]) -> list[str]:
    """One text for all routers of which the same is true, as those of a model's layers."""
    groups: dict[RouterMatch, list[RouterMatch]] = {}
    for match in found:
        groups.setdefault(dataclasses.replace(match, module="", location=""), []).append(match)
    return [_with_names(equal) for equal in groups.values()]


def _with_names(equal: list[RouterMatch]) -> str:
    first, last = equal[0], equal[-1]
    if len(equal) == 1:
        return str(first)
    if first.module and first.module != last.module:
        first = dataclasses.replace(first, module=f"{first.module} to {last.module}")
    if len({match.location for match in equal}) > 1:
        first = dataclasses.replace(first, location=f"{first.location} to {last.location}")
    return f"{len(equal)} routers, {first}"


def _explain_op(options) -> int:
    from .op_arguments import arguments, describe

    try:
        if options.json:
            print_json({name: [dataclasses.asdict(station) for station in stations]
                        for name, stations in arguments(options.op).items()})
        else:
            print(describe(options.op))
    except (OSError, ValueError) as error:
        parser().error(str(error))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if (options.model is None) == (options.op is None):
        parser().error("expected a model, or --op with the name of an op, found "
                       f"{'neither' if options.op is None else 'both'}")
    if options.op is not None:
        return _explain_op(options)
    try:
        target = _find(options.model)
        found = explain(target.model, target.args, kwargs=target.kwargs)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        parser().error(str(error))
    if options.json:
        print_json([dataclasses.asdict(match) for match in found])
        return 0
    print(*_equal_together(found),
          f"{sum(match.recognised for match in found)} of {len(found)} recognised", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
