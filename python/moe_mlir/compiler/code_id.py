"""What tells one build of the compiler from another."""

import functools
import hashlib
import struct
from pathlib import Path

from .._native import native

# In a wheel the compiler is a library beside the native module, which calls it.
_COMPILER = "libmoe_compiler.so"
_NOTE, _BUILD_ID = 4, 3


@functools.cache
def compiler_id() -> bytes:
    """Changes with every build of the compiler."""
    module = Path(native().__file__)
    compiler = module.with_name(_COMPILER)
    return b"".join(map(file_id, [module, compiler] if compiler.exists() else [module]))


def file_id(path: Path) -> bytes:
    """The linker's build ID of a library, a hash of what was linked; of others a hash of the file.

    A library of 100 MB would take a tenth of a second of each process to hash.
    """
    with open(path, "rb") as file:
        found = _build_id(file.read(1 << 16))
        if found:
            return found
        file.seek(0)
        return hashlib.file_digest(file, "sha256").digest()


def _build_id(head: bytes) -> bytes:
    """The descriptor of the note GNU of an ELF file of 64 bits, by its first bytes; empty if there is none."""
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        return b""
    (offset,), (size, count) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
    for index in range(count):
        at = offset + index * size
        if at + 56 > len(head):
            break
        kind, start, length = (*struct.unpack_from("<I", head, at), *struct.unpack_from("<Q", head, at + 8),
                               *struct.unpack_from("<Q", head, at + 32))
        if kind == _NOTE and start + length <= len(head):
            found = _find_note(head[start:start + length])
            if found:
                return found
    return b""


def _find_note(notes: bytes) -> bytes:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name = notes[at + 12:at + 12 + name_size]
        start = at + 12 + -(-name_size // 4) * 4
        if name == b"GNU\0" and kind == _BUILD_ID:
            return notes[start:start + size]
        at = start + -(-size // 4) * 4
    return b""
