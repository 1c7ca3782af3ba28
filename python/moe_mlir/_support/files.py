"""Files of the user: written as a whole or not at all, and read only where they are files.

Whoever writes a file of a name that the user gave goes through here: an interruption, a full disk or
an error leaves what was there before.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(
    path: str | os.PathLike[str],
    mode: str = "w",
    *,
    private: bool = False,
) -> Iterator[IO[Any]]:
    """A file to write, which takes the place of `path` where the body ends without an error.

    It is written beside `path` and renamed; a link to a file stays one, and permissions stay as they
    were. A device or a pipe, such as /dev/stdout, is written to as it is.

    Args:
        mode: "w" for text in UTF-8, "wb" for bytes.
        private: the file is for its user alone; a link of that name is replaced, not followed.

    Raises:
        OSError: `path` cannot be written; what was there stays.
    """
    encoding = None if "b" in mode else "utf-8"
    before = None if private else _status(path)
    if before is not None and not stat.S_ISREG(before.st_mode):
        with open(path, mode, encoding=encoding) as file:
            yield file
        return
    # What its owner has protected is not replaced by way of its folder.
    if before is not None and not os.access(path, os.W_OK):
        raise PermissionError(13, os.strerror(13), os.fspath(path))
    target = Path(os.path.realpath(path)) if before is not None else Path(path)
    staged = target.with_name(f".{target.name[:100]}.partial-{secrets.token_hex(4)}")
    handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                     0o600 if private else 0o666)
    try:
        if before is not None:
            os.fchmod(handle, before.st_mode & 0o777)
        with open(handle, mode, encoding=encoding) as file:
            yield file
        os.replace(staged, target)
    except BaseException:
        os.unlink(staged)
        raise


def write(path: str | os.PathLike[str], content: str | bytes, *, private: bool = False) -> None:
    """Writes a file as `replacing` does."""
    with replacing(path, "w" if isinstance(content, str) else "wb", private=private) as file:
        file.write(content)


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> IO[bytes]:
    """Opens a regular file to read.

    A pipe of that name would be waited for, and a device may do anything when it is opened.

    Raises:
        OSError: there is no such file that can be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"expected a regular file, found another kind: '{os.fspath(path)}'")
    return open(handle, "rb")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file, as `open_regular` opens it."""
    with open_regular(path) as file:
        return file.read()


def _status(path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
