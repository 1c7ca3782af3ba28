"""The disk cache tells one build of the compiler from another."""

import subprocess
from types import SimpleNamespace

import pytest

from moe_mlir.compiler import code_id


def library(folder, name, number, *flags):
    source, path = folder / f"{name}.cpp", folder / name
    source.write_text(f"int number() {{ return {number}; }}\n")
    subprocess.run(["g++", "-shared", "-fPIC", *flags, source, "-o", path], check=True)
    return path


@pytest.mark.parametrize(("flag", "size"), [("-Wl,--build-id=sha1", 20), ("-Wl,--build-id=none", 32)])
def test_libraries_of_other_code_have_other_ids(tmp_path, flag, size):
    """The linker's build ID; without one a hash of the file."""
    first, again, other = (code_id.file_id(library(tmp_path, f"{name}.so", number, flag))
                           for name, number in (("a", 1), ("a", 1), ("a", 2)))
    assert first == again != other and len(first) == len(other) == size


def test_a_file_that_is_no_library(tmp_path):
    for text in (b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\0" * 50, b"\x7fELF\x02\x01" + b"\xff" * 200):
        path = tmp_path / "file"
        path.write_bytes(text)
        assert len(code_id.file_id(path)) == 32


def test_the_compiler_of_a_wheel_counts(tmp_path, monkeypatch):
    """There the native module stays as it is when the compiler behind it changes."""
    module = library(tmp_path, "_moe.abi3.so", 0)
    monkeypatch.setattr(code_id, "native", lambda: SimpleNamespace(__file__=str(module)))
    found = []
    for number in (1, 2):
        library(tmp_path, "libmoe_compiler.so", number, "-Wl,--build-id=sha1")
        code_id.compiler_id.cache_clear()
        found.append(code_id.compiler_id())
    (tmp_path / "libmoe_compiler.so").unlink()
    code_id.compiler_id.cache_clear()
    found.append(code_id.compiler_id())
    code_id.compiler_id.cache_clear()
    assert len(set(found)) == 3
