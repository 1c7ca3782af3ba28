"""The disk cache of compiled code.

One file an entry, named after the SHA-256 of everything that the code depends
on. A file is `MAGIC, length, payload, SHA-256 of the payload`; it is written
beside the entries and published by one rename, so readers see whole files or
none, whoever dies when. A damaged file is deleted, reported once, and compiled
again. What lies in the cache is run: the folder must belong to the user alone.

Environment:
    MOE_MLIR_CACHE_DIR       the folder (default: the user's cache folder)
    MOE_MLIR_CACHE=0         no disk cache
    MOE_MLIR_CACHE_READONLY=1  read, never write
    MOE_MLIR_CACHE_SIZE      bytes to keep, oldest use goes first (default 2 GiB)

`moe cache [ls|verify|clear]` looks after it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from .._support.command_line import Parser, add_json, print_json
from .._support.files import open_regular

_MAGIC = b"MOECODE1"
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_OVERHEAD = len(_MAGIC) + _LENGTH_BYTES + _DIGEST_BYTES
_DEFAULT_SIZE = 2 << 30
# A staging file this old has lost its writer.
_STALE_SECONDS = 3600
_SUFFIX = ".code"

_warned: set[str] = set()


def _warn_once(message):
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def make_key(*parts: str | bytes) -> str:
    """The name of the entry that depends on exactly these texts or bytes."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def default_folder() -> Path:
    """MOE_MLIR_CACHE_DIR, or `moe-mlir` in the platform's user cache folder."""
    named = os.environ.get("MOE_MLIR_CACHE_DIR")
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "moe-mlir"
    root = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules: a relative path is invalid and ignored.
    base = Path(root) if root and os.path.isabs(root) else Path.home() / ".cache"
    return base / "moe-mlir"


def open_default() -> Cache | None:
    """The cache of this process's environment, or None where it is off or unsafe."""
    if os.environ.get("MOE_MLIR_CACHE") == "0":
        return None
    readonly = os.environ.get("MOE_MLIR_CACHE_READONLY", "0") not in ("", "0")
    size = os.environ.get("MOE_MLIR_CACHE_SIZE", "")
    if size and not size.isdecimal():
        _warn_once(f"expected MOE_MLIR_CACHE_SIZE to be a number of bytes, found '{size}'")
        size = ""
    try:
        return Cache(default_folder(), readonly=readonly,
                     size_limit=int(size) if size else _DEFAULT_SIZE)
    except (OSError, RuntimeError) as error:
        _warn_once(f"compiling without a disk cache: {error}")
        return None


# Bytes that this process may store until it looks whether a cache is too large.
_room: dict[tuple[str, int], int] = {}


class Cache:
    """A folder of entries.

    Args:
        folder: made with mode 0700 if it is missing.
        readonly: look up only.
        size_limit: bytes beyond which the entries used longest ago go; a process may exceed it
            by a hundredth before it looks again.

    Raises:
        PermissionError: others could write into the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        readonly: bool = False,
        size_limit: int = _DEFAULT_SIZE,
    ):
        self.folder = Path(folder)
        self.readonly = readonly
        self.size_limit = size_limit
        self._staging = self.folder / ".staging"
        if not readonly:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.exists():
            require_private(self.folder)

    def load(self, key: str) -> bytes | None:
        """The payload, or None when there is no sound entry."""
        path = self._path(key)
        try:
            data = read_own_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(f"cannot read the cache entry {path}: {error}; compiling again")
            return None
        payload = _unpack(data)
        if payload is None:
            _warn_once(f"the cache entry {path} is damaged; compiling again")
            if not self.readonly:
                _remove(path)
            return None
        _touch(path)
        return payload

    def store(self, key: str, payload: bytes) -> bool:
        """Publishes an entry. False where that is impossible: the caller has the
        payload, so a full disk or a vanished folder costs only the next start."""
        if self.readonly:
            return False
        try:
            self._staging.mkdir(mode=0o700, exist_ok=True)
            descriptor, staged = tempfile.mkstemp(dir=self._staging)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_pack(payload))
                os.replace(staged, self._path(key))
            except BaseException:
                _remove(staged)
                raise
        except OSError as error:
            _warn_once(f"cannot write to the cache {self.folder}: {error}")
            return False
        self._prune_after(len(payload))
        return True

    def _prune_after(self, stored: int) -> None:
        """A look at all entries, of which there may be thousands, is not worth it for each new one."""
        kind = (str(self.folder), self.size_limit)
        _room[kind] = _room.get(kind, 0) - stored
        if _room[kind] < 0:
            self.prune()
            _room[kind] = self.size_limit // 100

    def entries(self) -> list:
        """(key, bytes, time of last use) of every entry, oldest use first."""
        found = []
        try:
            with os.scandir(self.folder) as files:
                for file in files:
                    if file.name.endswith(_SUFFIX):
                        status = file.stat(follow_symlinks=False)
                        key = file.name.removesuffix(_SUFFIX)
                        found.append((key, status.st_size, status.st_mtime))
        except OSError:
            # Another process may be clearing the folder.
            pass
        return sorted(found, key=lambda entry: entry[2])

    def prune(self) -> None:
        """Removes what exceeds the size limit and what crashed writers left."""
        entries = self.entries()
        total = sum(size for _, size, _ in entries)
        for key, size, _ in entries:
            if total <= self.size_limit:
                break
            _remove(self._path(key))
            total -= size
        try:
            for file in os.scandir(self._staging):
                if time.time() - file.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                    _remove(file.path)
        except OSError:
            pass

    def verify(self) -> list:
        """Deletes the damaged entries and returns their keys."""
        damaged = []
        for key, _, _ in self.entries():
            try:
                sound = _unpack(read_own_file(self._path(key))) is not None
            except OSError:
                sound = False
            if not sound:
                damaged.append(key)
                _remove(self._path(key))
        return damaged

    def clear(self) -> int:
        """Removes every entry; returns how many there were."""
        entries = self.entries()
        for key, _, _ in entries:
            _remove(self._path(key))
        return len(entries)

    def _path(self, key):
        return self.folder / (key + _SUFFIX)


def require_private(folder: Path) -> None:
    """Raises PermissionError if someone else could plant files in `folder`."""
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"expected a folder at {folder}, found a file")
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"expected {folder} to belong to user {os.geteuid()}, found owner {status.st_uid}; "
            "set MOE_MLIR_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & 0o022:
        raise PermissionError(
            f"expected {folder} to be writable by its owner alone, found mode "
            f"{stat.filemode(status.st_mode)}; run `chmod 700 {folder}`"
        )
    for parent in folder.resolve().parents:
        mode = os.stat(parent).st_mode
        # In a sticky folder such as /tmp nobody can rename what others own.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(
                f"expected no folder above {folder} to be writable by everyone, found {parent} "
                f"with mode {stat.filemode(mode)}; set MOE_MLIR_CACHE_DIR to another place"
            )


def read_own_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file of this user; symbolic links are refused."""
    with open_regular(path, os.O_NOFOLLOW) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError("expected a regular file that belongs to this user")
        return file.read()


def _pack(payload: bytes) -> bytes:
    length = len(payload).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((_MAGIC, length, payload, hashlib.sha256(payload).digest()))


def _unpack(data: bytes) -> bytes | None:
    start = len(_MAGIC) + _LENGTH_BYTES
    length = int.from_bytes(data[len(_MAGIC):start], "little")
    if data[: len(_MAGIC)] != _MAGIC or len(data) != length + _OVERHEAD:
        return None
    payload = data[start : start + length]
    return payload if hashlib.sha256(payload).digest() == data[start + length :] else None


def _remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass


def _touch(path):
    try:
        os.utime(path)
    except OSError:
        pass


def parser() -> Parser:
    parser = Parser("cache", "Lists, verifies, or clears the disk cache of compiled code.",
                    examples=("moe cache ls --json", "moe cache clear"))
    parser.add_argument("action", nargs="?", default="ls", choices=("ls", "verify", "clear"),
                        help="ls (default): list; verify: remove damaged entries; clear: remove all")
    add_json(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    cache = open_default()
    if cache is None:
        print("the disk cache is off or cannot be used", file=sys.stderr)
        return 1
    if options.action == "ls":
        _list(cache, options.json)
        return 0
    removed = cache.clear() if options.action == "clear" else len(cache.verify())
    if options.json:
        print_json({"folder": cache.folder, "removed": removed})
    else:
        kind = "" if options.action == "clear" else "damaged "
        print(f"removed {removed} {kind}entries from {cache.folder}")
    return 0


def _list(cache, as_json):
    entries = cache.entries()
    if as_json:
        print_json({"folder": cache.folder, "entries": [
            {"key": key, "bytes": size, "used": used} for key, size, used in entries]})
    else:
        for key, size, used in entries:
            print(f"{key[:16]}  {size:>10}  {time.strftime('%F %T', time.localtime(used))}")
        print(f"{len(entries)} entries, {sum(e[1] for e in entries)} bytes in {cache.folder}")


if __name__ == "__main__":
    sys.exit(main())
