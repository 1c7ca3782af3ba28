"""Where the tools are: beside the package in a wheel, else in the build tree around it."""

from pathlib import Path

from .paths import PACKAGE

TOOLS = ("moe-compile", "moe-lsp-server", "moe-opt", "moe-reduce", "moe-run", "moe-sim")


def find_tool(name) -> Path | None:
    for folder in (PACKAGE / "bin", PACKAGE.parents[1] / "bin"):
        if (folder / name).exists():
            return folder / name
    return None
