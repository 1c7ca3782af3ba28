"""The console scripts `moe-opt`, `moe-compile`, ...: they become the wheel's tools.

A module beside the package and not in it: importing the package imports torch,
which takes longer than most runs of a tool.
"""

import functools
import os
import sys
from pathlib import Path


def find(name):
    """The tool in the wheel, or else in the build tree whose `python` this module is in."""
    folder = Path(__file__).absolute().parent
    tool = folder / "moe_mlir" / "bin" / name
    built = folder.parent / "bin" / name
    return built if built.exists() and not tool.exists() else tool


def run(name, arguments=None):
    """Replaces this process by the tool; returns an exit status only if there is none."""
    tool = find(name)
    # moe-compile reads torch programs with the first python3 in PATH: this one.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), path))
    try:
        os.execv(tool, [name, *(sys.argv[1:] if arguments is None else arguments)])
    except OSError as error:
        print(f"{name}: error: expected the tool at {tool}: {error.strerror}; install the "
              "moe-mlir wheel again", file=sys.stderr)
        return 1


moe_compile = functools.partial(run, "moe-compile")
moe_lsp_server = functools.partial(run, "moe-lsp-server")
moe_opt = functools.partial(run, "moe-opt")
moe_reduce = functools.partial(run, "moe-reduce")
moe_run = functools.partial(run, "moe-run")
moe_sim = functools.partial(run, "moe-sim")
