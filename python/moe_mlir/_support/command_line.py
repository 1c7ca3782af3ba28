"""What the parsers of all commands share: examples in the help, JSON, errors that suggest."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """The parser of `moe NAME`, with examples below its help.

    Errors are one line and exit with status 2. An option that does not exist is answered with the
    nearest that does. Headings are bold on a terminal alone, unless NO_COLOR is set.
    """

    def __init__(self, name: str, summary: str, *, examples: Sequence[str] = (), **options: Any):
        lines = "\n".join(f"  {example}" for example in examples)
        super().__init__(prog=f"moe {name}", description=summary,
                         epilog=f"examples:\n{lines}" if lines else None, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            near = difflib.get_close_matches(rest[0], self._option_string_actions, n=1)
            self.error(f"expected arguments that the command has, found '{rest[0]}'"
                       + (f"; did you mean {near[0]}?" if near else ""))
        return options

    def print_help(self, file: Any = None) -> None:
        stream = file or sys.stdout
        text = self.format_help()
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            text = re.sub(r"^([a-z ]+:)", "\033[1m\\1\033[0m", text, flags=re.MULTILINE)
        stream.write(text)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` lists them\n"
                  if message.startswith("expected arguments") and "did you" not in message
                  else f"{self.prog}: error: {message}\n")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    print()
