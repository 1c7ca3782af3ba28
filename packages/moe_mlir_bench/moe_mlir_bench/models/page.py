"""docs/Models.md: three sections, each measured on its own, which leaves the others as they are."""

import os
import re

from moe_mlir._support import files

REAL_WIDTHS = "Models of real widths"
FOLDERS = "Every model of transformers with experts"
FAMILIES = "Fifteen families in detail"
_ORDER = (REAL_WIDTHS, FOLDERS, FAMILIES)

_HEAD = """\
# Models

How fast models of the released widths are, compared with eager and Inductor; then whether every model of
transformers that has experts is recognised, compiled and decoded; then fifteen families in detail.
[Performance](Performance.md) has a chart of three of them.
"""


def read(path: str | os.PathLike[str]) -> dict[str, str]:
    """The sections of a file by their headings, without these; none where there is no file."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        parts = re.split(r"^## (.*)\n", file.read(), flags=re.MULTILINE)
    return {heading: text.strip("\n") + "\n" for heading, text in zip(parts[1::2], parts[2::2])}


def write(path: str | os.PathLike[str], heading: str, text: str) -> None:
    """Replaces one section."""
    sections = {**read(path), heading: text.strip("\n") + "\n"}
    files.write(path, "\n".join([_HEAD, *(f"## {name}\n\n{sections[name]}" for name in _ORDER
                                          if name in sections)]))
