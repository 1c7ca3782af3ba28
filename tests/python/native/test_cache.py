"""The disk cache: keys, damage, races, limits and permissions."""

import os
import signal
import subprocess
import sys
import time
import warnings
from unittest import mock

import pytest
import torch
from conftest import AFFINE
from support import forked_python

from moe_mlir.compiler import cache, jit


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())


@pytest.fixture
def store(tmp_path):
    return cache.Cache(tmp_path / "own")


def entry_file(store):
    (path,) = store.folder.glob("*.code")
    return path


def test_stores_and_loads(store):
    assert store.load("k") is None
    assert store.store("k", b"payload")
    assert store.load("k") == b"payload"
    assert [e[0] for e in store.entries()] == ["k"]


def test_keys_separate_their_parts():
    assert cache.make_key("ab", "c") != cache.make_key("a", "bc")
    assert cache.make_key("ab", "c") == cache.make_key(b"ab", "c")
    assert cache.make_key("a") != cache.make_key("a", "")


@pytest.mark.parametrize("at", [0, 8, 15, 16, 20, -33, -1])
def test_a_flipped_byte_is_found_and_reported_once(store, at):
    store.store("k", b"payload of some length")
    path = entry_file(store)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert store.load("k") is None
    assert not path.exists()
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load("k") is None


@pytest.mark.parametrize("keep", [0, 1, 8, 16, 30])
def test_a_truncated_file_is_damaged(store, keep):
    store.store("k", b"payload of some length")
    path = entry_file(store)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert store.load("k") is None


def test_verify_removes_the_damaged_entries_alone(store):
    store.store("good", b"1")
    store.store("bad", b"2")
    (store.folder / "bad.code").write_bytes(b"x")
    assert store.verify() == ["bad"]
    assert store.load("good") == b"1"
    assert store.clear() == 1 and store.entries() == []


def test_a_symbolic_link_is_not_followed(store, tmp_path):
    store.store("k", b"payload")
    path = entry_file(store)
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="cannot read"):
        assert store.load("k") is None


def test_the_oldest_use_goes_first(tmp_path):
    # Room for three entries of 100 bytes and what surrounds them.
    store = cache.Cache(tmp_path / "own", size_limit=460)
    for i, key in enumerate("abc"):
        store.store(key, bytes(100))
        os.utime(store.folder / f"{key}.code", (i, i))
    assert store.load("a") is not None  # now the latest use
    store.store("d", bytes(100))
    assert sorted(e[0] for e in store.entries()) == ["a", "c", "d"]


def test_entries_are_looked_at_once_for_many_small_ones(tmp_path):
    """Objects come and go, one for each compilation: a hundredth of the limit lies between looks."""
    looks, folder = [], tmp_path / "own"
    with mock.patch.object(cache.Cache, "entries", lambda store: looks.append(store) or []):
        for i in range(30):
            cache.Cache(folder, size_limit=100_000).store(f"k{i}", bytes(100))
    assert len(looks) == 3


def test_stale_staging_files_go(store):
    store.store("a", b"1")
    left = store.folder / ".staging" / "left"
    left.write_bytes(b"half")
    store.prune()
    assert left.exists()
    os.utime(left, (time.time() - 7200,) * 2)
    store.prune()
    assert not left.exists()


def test_new_folders_are_private(store):
    assert store.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused(tmp_path, mode):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="chmod 700"):
        cache.Cache(folder)


def test_a_parent_that_everyone_can_write_is_refused(tmp_path):
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(PermissionError, match="above"):
        cache.Cache(parent / "own")
    parent.chmod(0o1777)
    cache.Cache(parent / "own")


def test_readonly_never_writes(tmp_path):
    cache.Cache(tmp_path / "own").store("k", b"1")
    store = cache.Cache(tmp_path / "own", readonly=True)
    assert store.load("k") == b"1"
    assert not store.store("l", b"2")
    (store.folder / "k.code").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning):
        store.load("k")
    assert (store.folder / "k.code").exists()


def test_a_folder_that_vanishes_costs_only_the_entry(store):
    os.rmdir(store.folder)
    store.folder.write_text("a file now")
    with pytest.warns(RuntimeWarning, match="cannot write"):
        assert not store.store("k", b"1")


def test_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("MOE_MLIR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "moe-mlir"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    if sys.platform == "linux":
        assert cache.default_folder() == tmp_path / ".cache" / "moe-mlir"
    monkeypatch.setenv("MOE_MLIR_CACHE", "0")
    assert cache.open_default() is None
    monkeypatch.delenv("MOE_MLIR_CACHE")
    monkeypatch.setenv("MOE_MLIR_CACHE_SIZE", "many")
    with pytest.warns(RuntimeWarning, match="expected MOE_MLIR_CACHE_SIZE"):
        assert cache.open_default().size_limit == 2 << 30


WRITER = """
import os, sys
from moe_mlir.compiler.cache import Cache
store = Cache(sys.argv[1])
print(os.getpid(), flush=True)
for i in range(10**6):
    key = f"k{i % 7}"
    store.store(key, key.encode() * 5000)
    data = store.load(key)
    assert data is None or data == key.encode() * 5000, "a torn entry"
"""


def test_killed_writers_leave_no_torn_entry(store):
    for _ in range(3):
        writers = [subprocess.Popen([forked_python(), "-W", "error", "-c", WRITER, store.folder],
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                   for _ in range(2)]
        ids = [writer.stdout.readline().strip() for writer in writers]
        time.sleep(0.2)
        for writer, process in zip(writers, ids, strict=True):
            assert process.isdecimal() and writer.poll() is None, writer.stderr.read()
            os.kill(int(process), signal.SIGKILL)  # the fork itself, which has ended then
            assert writer.wait() == -signal.SIGKILL
            writer.stdout.close()
            writer.stderr.close()
        assert store.verify() == []
    assert store.entries()


# ---------------------------------------------------------------------- jit


def run(executable):
    x = torch.ones(2, 4)
    out = torch.empty_like(x)
    executable.function("affine")(x, 2.0, 1, out)
    return out.sum().item()


def test_compile_cached_compiles_once(moe, monkeypatch):
    first = jit.compile_cached(AFFINE)
    assert jit.compile_cached(AFFINE) is first
    jit._loaded.clear()
    # From disk now: the compiler must not be called.
    monkeypatch.setattr(cache.Cache, "store", lambda *_: pytest.fail("compiled again"))
    second = jit.compile_cached(AFFINE)
    assert second is not first
    assert run(first) == run(second) == 24


def test_a_damaged_entry_compiles_again():
    jit.compile_cached(AFFINE)
    jit._loaded.clear()
    path = entry_file(cache.open_default())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert run(jit.compile_cached(AFFINE)) == 24


def test_without_a_disk_cache(monkeypatch):
    monkeypatch.setenv("MOE_MLIR_CACHE", "0")
    assert run(jit.compile_cached(AFFINE)) == 24
    assert not cache.default_folder().exists()


def test_an_unsafe_cache_warns_and_compiles():
    folder = cache.default_folder()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="without a disk cache"):
        assert run(jit.compile_cached(AFFINE)) == 24


def test_the_pipeline_is_part_of_the_key(moe):
    jit.compile_cached(AFFINE)
    with pytest.raises(moe.MoeError):
        jit.compile_cached(AFFINE, pipeline="canonicalize")


def test_errors_are_not_cached(moe):
    for _ in range(2):
        with pytest.raises(moe.MoeError):
            jit.compile_cached("broken")
    assert cache.open_default().entries() == []


def test_dump_dir_shows_the_passes_although_cached(monkeypatch, tmp_path):
    jit.compile_cached(AFFINE)
    jit._loaded.clear()
    monkeypatch.setenv("MOE_MLIR_DUMP_DIR", str(tmp_path / "dumps"))
    jit.compile_cached(AFFINE)
    assert list((tmp_path / "dumps").glob("*/00-input.mlir"))


def test_command_line(capsys):
    jit.compile_cached(AFFINE)
    assert cache.main(["ls"]) == 0
    assert "1 entries" in capsys.readouterr().out
    assert cache.main(["verify"]) == 0
    assert "removed 0 damaged" in capsys.readouterr().out
    assert cache.main(["clear"]) == 0
    assert "removed 1 entries" in capsys.readouterr().out
