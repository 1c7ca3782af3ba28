"""docs/Models.md: the tiny models first, then the section of models of real widths.

Each is measured on its own, and leaves the other as it is.
"""

import os

from moe_mlir._support import files

REAL_WIDTHS = "## Models of real widths\n"


def read(path: str | os.PathLike[str]) -> tuple[str, str]:
    """(the page in front of the section, the section) of a file; empty where there is none."""
    if not os.path.exists(path):
        return "", ""
    with open(path) as file:
        front, heading, section = file.read().partition("\n" + REAL_WIDTHS)
    return front, REAL_WIDTHS + section if heading else ""


def write(path: str | os.PathLike[str], front: str, section: str) -> None:
    files.write(path, "\n".join(part for part in (front, section) if part))
