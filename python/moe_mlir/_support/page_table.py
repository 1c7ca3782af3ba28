"""A table of a page of docs that a command makes, between two lines of the page."""

import argparse
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import files

_END = "<!-- end -->"


@dataclass(frozen=True)
class PageTable:
    """The table that `make` gives, as `command` prints it or renews it on a page."""

    command: str
    make: Callable[[], str]

    def on_page(self, text: str) -> str:
        """The page's text with the table between its marks."""
        begin = f"<!-- begin: {self.command} -->"
        pattern = re.escape(begin) + ".*?" + re.escape(_END)
        if not re.search(pattern, text, re.DOTALL):
            raise ValueError(f"expected a page with the lines {begin} and {_END}, found none")
        return re.sub(pattern, lambda _: f"{begin}\n{self.make()}\n{_END}", text, flags=re.DOTALL)

    def run(self, description: str) -> None:
        """What the command does with its arguments."""
        parser = argparse.ArgumentParser(prog=self.command, description=description)
        parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="the page to renew")
        options = parser.parse_args()
        if options.write is None:
            print(self.make())
        else:
            files.write(options.write, self.on_page(options.write.read_text()))
