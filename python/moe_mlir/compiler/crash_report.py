"""Files that reproduce a failed compilation.

When the compiler refuses what we gave it, the module goes to a file that says
how it was compiled, and the error names the file and the one command that
compiles it again:

    moe reproduce FILE.mlir [--phases DIR]

The file is MLIR text, so moe-opt and moe-reduce read it as well. It holds no
weights. MOE_MLIR_REPRODUCER_DIR names the folder; by default it is a new one of
the process among the temporary files.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._native import native
from .._support import files
from .._support.command_line import Parser
from .._version import __version__
from .uncached import compile_bytes

if TYPE_CHECKING:
    from .._native import MoeError

_TITLE = "// moe-mlir reproducer"
_KINDS = ("object", "ptx", "kernels")


def explain(error: MoeError, kind: str, text: str, target: str) -> MoeError:
    """The error again, naming a file that reproduces it."""
    try:
        path = write(folder(), kind, text, target, str(error))
        hint = (f"the module is in {path}; compile it again with "
                f"`moe reproduce {path}`")
    except OSError as reason:
        path, hint = None, f"no file that reproduces this could be written: {reason}"
    explained = type(error)(f"{error}\n{hint}")
    explained.diagnostics = error.diagnostics
    explained.reproducer = path
    return explained


def folder() -> Path:
    """Where reproducers go; made if it is missing."""
    if named := os.environ.get("MOE_MLIR_REPRODUCER_DIR"):
        path = Path(named)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path
    return _private_folder()


@functools.cache
def _private_folder() -> Path:
    # Under a name that nobody can foresee, and so fill with links.
    return Path(tempfile.mkdtemp(prefix="moe-mlir-"))


def write(where: str | os.PathLike[str], kind: str, text: str, target: str, message: str) -> Path:
    """Writes a reproducer, named after its content, and returns its path."""
    head = [_TITLE, f"// kind: {kind}", f"// target: {target}",
            f"// moe-mlir {__version__}, LLVM {native().llvm_version()}, CPU {native().host_cpu()[0]}",
            *(f"// {line}" for line in message.splitlines()), ""]
    digest = hashlib.sha256("\0".join((kind, text, target)).encode()).hexdigest()
    path = Path(where) / f"{kind}-{digest[:16]}.mlir"
    files.write(path, "\n".join(head) + text, private=True)
    return path


def read(path: str | os.PathLike[str]) -> tuple[str, str, str]:
    """(kind, text, target) of a reproducer.

    Raises:
        ValueError: the file is no reproducer.
    """
    try:
        content = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    kind, target = (re.search(rf"^// {name}: (.+)$", content, re.MULTILINE)
                    for name in ("kind", "target"))
    if not content.startswith(_TITLE) or not kind or not target or kind[1] not in _KINDS:
        raise ValueError(f"expected {path} to begin with '{_TITLE}', a kind and a target, found "
                         "another file; moe-compile compiles any MLIR text")
    return kind[1], content, target[1]


def parser() -> Parser:
    parser = Parser("reproduce", "Compiles a module again whose compilation failed.",
                    examples=("moe reproduce failed.mlir --phases phases",))
    parser.add_argument("file", help="a file that a failed compilation named")
    parser.add_argument("--phases", metavar="DIR", default="",
                        help="write the IR after every pass there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        kind, text, target = read(options.file)
        payload = compile_bytes(kind, text, target, options.phases)
    except ValueError as error:  # MoeError is one
        print(error, file=sys.stderr)
        if options.phases:
            print(f"the IR up to there is in {options.phases}", file=sys.stderr)
        return 1
    print(f"compiled: {kind} of {len(payload)} bytes for {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
