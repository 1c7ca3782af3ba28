"""The command `moe`: one name for all tools and all commands of the package.

A module beside the package and not in it, as moe_mlir_tools.py is: importing the package
imports torch, which neither the overview nor the tools in C++ need.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import moe_mlir_tools


@dataclass(frozen=True)
class Command:
    """A sub-command: a tool in C++, or a module of Python with `parser` and `main`."""

    name: str
    summary: str
    example: str
    module: str = ""
    tool: str = ""


GROUPS = {
    "Models": (
        Command("explain", "list the routers of a model, and why one is not recognised",
                "moe explain model.py:make", module="moe_mlir.cli.explain"),
        Command("compile", "compile a router or an exported model to an artifact, PTX, or assembly",
                "moe compile router.mlir -o router.artifact --target=cpu", tool="moe-compile"),
        Command("run", "run a compiled artifact, without torch or LLVM",
                "moe run router.artifact --list", tool="moe-run"),
        Command("models", "measure the supported families of transformers models",
                "moe models Mixtral", module="moe_mlir_bench.models.__main__"),
        Command("demo", "train a small model, compile it, and compare it with eager PyTorch",
                "moe demo --steps 50", module="moe_mlir_bench.demo.__main__"),
    ),
    "Compiler": (
        Command("opt", "apply passes to IR", "moe opt router.mlir --moe-to-cpu", tool="moe-opt"),
        Command("phases", "make an HTML page that shows what each pass changed",
                "moe phases dumps -o phases.html", module="moe_mlir.compiler.phases"),
        Command("reproduce", "compile a module again whose compilation failed",
                "moe reproduce failed.mlir", module="moe_mlir.compiler.crash_report"),
        Command("reduce", "shrink IR that still shows a bug",
                "moe reduce bug.mlir --reduction-tree='test=./is_interesting.sh'",
                tool="moe-reduce"),
        Command("lsp", "serve editors that show MLIR", "moe lsp", tool="moe-lsp-server"),
    ),
    "GPU kernels": (
        Command("sim", "run a PTX kernel without a GPU and check it for races",
                "moe sim kernel.ptx --block 64 --arg buf:f32:64:iota", tool="moe-sim"),
        Command("check", "run a Python file whose Triton kernels are checked for races, without a GPU",
                "moe check softmax.py", module="moe_mlir.cli.check"),
        Command("gpu-check", "pack kernels for a machine with a GPU, and check and time them there",
                "moe gpu-check pack FOLDER", module="moe_mlir_bench.gpu_check.__main__"),
    ),
    "This machine": (
        Command("bench", "compare with eager PyTorch and torch.compile",
                "moe bench --quick", module="moe_mlir_bench.bench.__main__"),
        Command("tune", "measure the kernels' block sizes, and keep what is faster",
                "moe tune --dry-run", module="moe_mlir.cli.tune"),
        Command("doctor", "report versions, hardware, and what is missing",
                "moe doctor", module="moe_mlir.cli.doctor"),
        Command("config", "print where C++ programs find the runtime's headers and library",
                "moe config --cmake-dir", module="moe_mlir.cli.config"),
        Command("cache", "list, verify, or clear the cache of compiled code",
                "moe cache ls", module="moe_mlir.compiler.cache"),
        Command("completion", "print a script that completes commands in your shell",
                "moe completion bash", module="moe_mlir.cli.completion"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}

# Its own help has a thousand lines, most of them LLVM's.
_OPT_HELP = """\
usage: moe opt [FILE.mlir] [PASSES] [-o FILE]

Reads IR, applies passes and pipelines in the order of the command line, and prints the result.

examples:
  moe opt router.mlir --moe-to-cpu
  moe opt router.mlir --moe-tile-and-fuse --mlir-print-ir-after-all

"""


def is_coloured(stream) -> bool:
    """A terminal whose user does not want plain text (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def overview(coloured: bool = False) -> str:
    bold = "\033[1m{}\033[0m" if coloured else "{}"
    lines = ["usage: moe COMMAND [OPTIONS]", "",
             "Compiles the routing of mixture-of-experts models. `moe COMMAND --help` describes a "
             "command.", ""]
    for title, commands in GROUPS.items():
        lines.append(bold.format(f"{title}:"))
        lines += [f"  {command.name:<11} {command.summary}" for command in commands] + [""]
    lines += [bold.format("Examples:"), "  moe doctor", "  moe explain model.py:make",
              "  moe run router.artifact --list", "", "The exit status is 0 only if all went well."]
    return "\n".join(lines)


def passes(text: str) -> str:
    """Of the help of moe-opt: the passes and pipelines of moe, each with its options."""
    found, ours = [], False
    for line in text.splitlines():
        match = re.match(r"( +)--([\w-]+)", line)
        if match is None:
            continue
        if len(match[1]) <= 6:
            ours = match[2].startswith(("moe-", "convert-moe-"))
        if ours:
            found.append(re.sub(r" +- +", "  ", f"  {line.strip()}" if len(match[1]) <= 6
                                else f"      {line.strip()}", count=1))
    return "\n".join(found)


def _help_of_opt() -> str:
    shown = subprocess.run([moe_mlir_tools.find("moe-opt"), "--help"], capture_output=True,
                           text=True, check=True)
    return (f"{_OPT_HELP}passes and pipelines of moe:\n{passes(shown.stdout)}\n\n"
            "`moe-opt --help` also lists the passes of MLIR.")


def run_tool(command: Command, arguments: Sequence[str]) -> int:
    """Replaces this process by a tool in C++; its help begins with an example."""
    if "--help" in arguments or "-h" in arguments:
        if command.name == "opt":
            print(_help_of_opt())
            return 0
        print(f"moe {command.name}: {command.summary}\n\nexample:\n  {command.example}\n", flush=True)
        arguments = ["--help"]
    return moe_mlir_tools.run(command.tool, arguments)


def missing_package(command: Command) -> str | None:
    """What to install for a command that is in a package of its own; None where nothing misses."""
    package = command.module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return None
    return (f"expected the package {package}, which has the command {command.name}, found none; "
            f"`pip install {package.replace('_', '-')}`")


def run_module(command: Command, arguments: Sequence[str]) -> int:
    if command.name == "gpu-check":
        # It has checked kernels compiled now.
        os.environ.setdefault("MOE_MLIR_CACHE", "0")
    if (problem := missing_package(command)) is not None:
        print(f"moe: error: {problem}", file=sys.stderr)
        return 2
    return importlib.import_module(command.module).main(list(arguments))


def _version() -> str:
    # A text, so that torch need not be imported for it.
    text = (Path(__file__).with_name("moe_mlir") / "_version.py").read_text()
    match = re.search(r'"([\d.]+)"', text)
    return match[1] if match else "unknown"


def _refuse(name: str) -> int:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean `moe {near[0]}`?" if near else "; `moe --help` lists them"
    print(f"moe: error: expected a command, found '{name}'{hint}", file=sys.stderr)
    return 2


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("--help", "-h", "help"):
        print(overview(is_coloured(sys.stdout)))
        return 0
    if name == "--version":
        print(f"moe {_version()}")
        return 0
    if name not in COMMANDS:
        return _refuse(name)
    command = COMMANDS[name]
    if arguments is None:
        # As of any filter: `moe models | head` ends without a traceback.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return (run_tool if command.tool else run_module)(command, rest)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
