"""`moe completion SHELL`: a script that completes the command `moe`, made by shtab."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from collections.abc import Sequence

import moe_mlir_command as command
import moe_mlir_tools

from .._support.command_line import Parser

# The parsers of the package name files by these.
_FILES = re.compile(r"FILE|FOLDER|DIR", re.IGNORECASE)


def parser() -> Parser:
    parser = Parser("completion", "Prints a script that completes commands, options, and files of "
                    "`moe`.\nNeeds shtab: pip install 'moe-mlir[completion]'.", examples=(
                        'bash: eval "$(moe completion bash)"        (in ~/.bashrc)',
                        "zsh:  moe completion zsh > ~/.zfunc/_moe   (a folder of $fpath)"))
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def _of_tool(name: str, text: str) -> argparse.ArgumentParser:
    """The options in the help of a tool in C++."""
    found = argparse.ArgumentParser(prog=f"moe {name}", add_help=False)
    added: set[str] = set()
    for match in re.finditer(r"^ +(--[a-z][\w-]*)(.*)$", text, re.MULTILINE):
        if match[1] not in added:
            added.add(match[1])
            takes = re.match(r"=| [A-Z]", match[2])
            found.add_argument(match[1], action="store" if takes else "store_true")
    found.add_argument("file", metavar="FILE", nargs="?")
    return found


def _help_of(one: command.Command) -> str:
    """The help of a tool, without the hundreds of options that MLIR adds to some."""
    if one.name in ("lsp", "reduce"):
        return ""
    shown = subprocess.run([moe_mlir_tools.find(one.tool), "--help"], capture_output=True,
                           text=True, check=True).stdout
    return command.passes(shown) if one.name == "opt" else shown


def whole_parser() -> argparse.ArgumentParser:
    """One parser of all commands."""
    whole = argparse.ArgumentParser(prog="moe")
    whole.add_argument("--version", action="store_true")
    commands = whole.add_subparsers()
    for one in command.COMMANDS.values():
        if one.tool:
            part = _of_tool(one.name, _help_of(one))
        elif one.name == "completion":
            part = parser()
        elif command.missing_package(one) is not None:
            continue
        else:
            part = importlib.import_module(one.module).parser()
        # argparse makes its parsers itself; shtab reads this table of them.
        commands._name_parser_map[one.name] = part
        commands._choices_actions.append(
            commands._ChoicesPseudoAction(one.name, (), one.summary))
    return whole


def _complete_files(parser, shtab) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                _complete_files(part, shtab)
        elif _FILES.search(str(action.metavar or action.dest)):
            action.complete = shtab.FILE


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        import shtab
    except ImportError:
        parser().error("expected the package shtab, found none; `pip install shtab`")
    whole = whole_parser()
    _complete_files(whole, shtab)
    print(shtab.complete(whole, options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
