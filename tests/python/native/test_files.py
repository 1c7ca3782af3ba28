"""Files of the user: written as a whole or not at all, and read only where they are files."""

import os
import stat

import pytest

from moe_mlir._support import files
from moe_mlir.compiler import cache


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as file:
        file.write("half of")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as file:
        file.write("half of")
        file.flush()
        assert path.read_text() == "old"
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    files.write(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    files.write(path, b"\xff")
    assert path.read_bytes() == b"\xff" and list(tmp_path.iterdir()) == [path]


def test_new_files_have_the_permissions_of_others(tmp_path):
    (tmp_path / "other").touch()
    files.write(tmp_path / "file", "text")
    files.write(tmp_path / "private", "text", private=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["file"] == modes["other"] and modes["private"] == 0o600


def test_links_stay_links(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"
    files.write(tmp_path / "link", "mine", private=True)
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "new"


def test_what_is_no_file_is_written_to(tmp_path):
    read, write = os.pipe()
    files.write(f"/proc/self/fd/{write}", "through a pipe")
    assert os.read(read, 99) == b"through a pipe"
    with pytest.raises(IsADirectoryError):
        files.write(tmp_path, "text")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_protected_file_is_kept(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o400)
    with pytest.raises(PermissionError):
        files.write(path, "new")
    assert path.read_text() == "old"


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match="expected a regular file"):
            files.read_regular(path)


def test_a_pipe_as_entry_of_the_cache_is_replaced(tmp_path):
    store = cache.Cache(tmp_path / "cache")
    key = cache.make_key("pipe")
    os.mkfifo(store.folder / f"{key}.code")
    with pytest.warns(RuntimeWarning, match="cannot read the cache entry"):
        assert store.load(key) is None
    assert store.store(key, b"code") and store.load(key) == b"code"
