"""Weights of an artifact: where they lie in its file, what is checked of them, who shares them."""

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import BUILD, rewrite_manifest, run_tool

import moe_mlir

FILE = "weights.safetensors"
ROWS, WIDTH = 17000, 2048  # 70 MB: more than is checked whole at every load


class Lookup(torch.nn.Module):
    """Tied tables that are larger than what is checked at every load, and small odd tensors."""

    def __init__(self):
        super().__init__()
        table = torch.arange(ROWS)[:, None] - torch.arange(WIDTH)
        self.embedding = torch.nn.Parameter(table.bfloat16())
        self.head = self.embedding
        self.bias = torch.nn.Parameter(torch.randn(7))
        self.scale = torch.nn.Parameter(torch.randn(3, dtype=torch.float16))

    def forward(self, ids):
        return self.embedding[ids], self.head[ids] + 1, self.bias * 2, self.scale + self.scale


@pytest.fixture(scope="module")
def lookup(tmp_path_factory):
    """The model and its artifact."""
    folder = tmp_path_factory.mktemp("lookup")
    torch.manual_seed(0)
    model = Lookup().eval()
    torch.export.save(torch.export.export(model, (torch.tensor([3, 5]),)), folder / "lookup.pt2")
    done = run_tool("moe-compile", folder / "lookup.pt2", "-o", folder / "artifact")
    assert done.returncode == 0, done.stderr
    (folder / "lookup.pt2").unlink()
    np.save(folder / "ids.npy", np.array([1, ROWS - 1]))
    return model, folder / "artifact"


@pytest.fixture
def copy(lookup, tmp_path):
    return shutil.copytree(lookup[1], tmp_path / "copy")


def header_of(folder):
    data = (folder / FILE).read_bytes()
    length, = struct.unpack("<Q", data[:8])
    return 8 + length, json.loads(data[8:8 + length])


def run(folder, *options):
    """What moe-run says of the artifact, on ids.npy beside it."""
    np.save(folder.parent / "ids.npy", np.array([1, ROWS - 1]))
    return run_tool("moe-run", folder, "--input", folder.parent / "ids.npy", *options)


def test_weights_keep_their_types_and_start_where_kernels_want_them(lookup):
    model, folder = lookup
    start, header = header_of(folder)
    assert start % 64 == 0
    assert all((start + entry["data_offsets"][0]) % 64 == 0 for name, entry in header.items()
               if not name.startswith("__padding__/"))
    stored = load_file(folder / FILE)  # it is a file of the format for others, too
    assert torch.equal(stored["bias"], model.bias) and torch.equal(stored["scale"], model.scale)
    assert sorted(e["dtype"] for n, e in header.items() if n[0] != "_") == ["BF16", "F16", "F32"]
    entry = json.loads((folder / "manifest.json").read_text())["files"][FILE]
    assert entry["sha256"] == hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


def test_tied_weights_are_stored_once_and_read_twice(lookup, tmp_path):
    model, folder = lookup
    assert (folder / FILE).stat().st_size < 1.1 * ROWS * WIDTH * 2
    program = json.loads((folder / "program.json").read_text())
    assert [a["stored_as"] for a in program["arguments"] if "stored_as" in a] == ["embedding"]
    ids = torch.tensor([1, ROWS - 1])
    rows, tied, *rest = model(ids)
    for found, expected in zip(moe_mlir.load(folder)(ids), (rows, tied, *rest), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    done = run(folder, "--output", tmp_path / "rows.npy", "--output", tmp_path / "tied.npy")
    assert done.returncode == 0, done.stderr
    for name, expected in (("rows", rows), ("tied", tied)):
        found = torch.from_numpy(np.load(tmp_path / f"{name}.npy").view(np.int16))
        assert torch.equal(found.view(torch.bfloat16), expected)


def test_two_processes_share_the_pages_of_weights(lookup, tmp_path):
    _, folder = lookup
    code = ("import sys, torch, moe_mlir; m = moe_mlir.load(sys.argv[1], verify=True); "
            "m(torch.tensor([1, 2])); print(flush=True); sys.stdin.read()")
    pipe = subprocess.PIPE
    python = subprocess.Popen([sys.executable, "-c", code, folder], stdin=pipe, stdout=pipe)
    np.save(tmp_path / "ids.npy", np.array([1, 2]))
    tool = subprocess.Popen([BUILD / "bin/moe-run", folder, "--verify", "--input",
                             tmp_path / "ids.npy", "--repeat", "1000000"])
    try:
        assert python.stdout.readline() == b"\n"
        # moe-run has read them all when it has made its first call; then all are shared.
        while tool.poll() is None and (found := mapping_of(tool.pid)).get("Rss", 0) < ROWS * WIDTH * 2:
            pass
        assert tool.poll() is None
        for pages in (found, mapping_of(python.pid)):
            assert pages["Rss"] >= ROWS * WIDTH * 2
            # Dirty are those that the system has not written to the disk yet.
            assert pages["Shared_Clean"] + pages["Shared_Dirty"] == pages["Rss"]
            assert pages["Private_Clean"] == pages["Private_Dirty"] == pages["Anonymous"] == 0
            assert pages["Pss"] <= 0.51 * pages["Rss"]
    finally:
        tool.kill()
        python.kill()
        tool.wait()
        python.communicate()


def mapping_of(pid):
    """What the system says of the pages of the weights' file in a process, in bytes."""
    with open(f"/proc/{pid}/smaps") as file:
        regions = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", file.read())
    return {name: int(kilobytes) * 1024 for region in regions if FILE in region.split("\n")[0]
            for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB", region, re.M)}


def test_values_of_large_weights_are_checked_when_asked(copy):
    with open(copy / FILE, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert moe_mlir.load(copy) and run(copy).returncode == 0
    with pytest.raises(ValueError, match=f"{FILE} to have SHA-256"):
        moe_mlir.load(copy, verify=True)
    done = run(copy, "--verify")
    assert done.returncode == 1 and f"{FILE} to have SHA-256" in done.stderr


def test_weights_of_older_compilers_are_checked_whole(copy):
    rewrite_manifest(copy, lambda m: m["files"][FILE].pop("header_sha256"))
    assert moe_mlir.load(copy) and run(copy).returncode == 0
    rewrite_manifest(copy, lambda m: m["files"][FILE].update(sha256="0" * 64))
    with pytest.raises(ValueError, match="to have SHA-256 0000"):
        moe_mlir.load(copy)
    assert "to have SHA-256 0000" in run(copy).stderr


def shorter(folder):
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 64)


def another_header(change):
    """Rewrites the header in its place, without its digest."""
    def apply(folder):
        start, header = header_of(folder)
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        with open(folder / FILE, "r+b") as file:
            file.write(struct.pack("<Q", start - 8) + text.ljust(start - 8)[:start - 8])
    return apply


def with_digest(damage):
    """The same with the digests of a compiler that did it."""
    def apply(folder):
        damage(folder)
        data = (folder / FILE).read_bytes()
        start = 8 + min(struct.unpack("<Q", data[:8])[0], len(data) - 8)
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(),
                 "header_sha256": hashlib.sha256(data[:start]).hexdigest()}
        rewrite_manifest(folder, lambda m: m["files"][FILE].update(entry))
    return apply


def moved(name, begin, end):
    return lambda header: header[name].update(data_offsets=[begin, end])


def a_long_header(folder):
    with open(folder / FILE, "r+b") as file:
        file.write(struct.pack("<Q", 1 << 40))


DAMAGED = {
    "missing": (lambda f: (f / FILE).unlink(), FILE),
    "empty": (lambda f: os.truncate(f / FILE, 0), "bytes, found 0; the artifact is damaged"),
    "truncated": (shorter, "; the artifact is damaged, compile it again"),
    "header": (another_header(moved("scale", 0, 6)), f"{FILE} to have SHA-256"),
    "overlap": (with_digest(another_header(moved("scale", 0, 6))), "apart from that of"),
    "outside": (with_digest(another_header(moved("bias", 1 << 40, (1 << 40) + 28))),
                "'bias' within the file"),
    "backwards": (with_digest(another_header(moved("bias", 28, 0))), "'bias' within the file"),
    "size": (with_digest(another_header(lambda h: h["bias"].update(shape=[8]))),
             "'bias' within the file"),
    "dtype": (with_digest(another_header(lambda h: h["bias"].update(dtype="F8"))), "found F8"),
    "no offsets": (with_digest(another_header(lambda h: h["bias"].pop("data_offsets"))),
                   "data_offsets"),
    "no tensor": (with_digest(another_header(lambda h: h.pop("bias"))), "'bias', found no such tensor"),
    "cut header": (with_digest(a_long_header), "ends within its header"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_weights_are_refused_before_anything_runs(copy, case):
    damage, message = DAMAGED[case]
    damage(copy)
    with pytest.raises(ValueError, match=re.escape(message)):
        moe_mlir.load(copy)
    done = run(copy)
    assert done.returncode == 1 and message in done.stderr, done
    assert done.stderr.startswith("moe-run: error: ")


def test_tensors_that_start_elsewhere_are_copied(copy):
    """As compilers wrote them before they aligned any."""
    from safetensors.torch import save_file

    model = moe_mlir.load(copy)
    ids = torch.tensor([1, ROWS - 1])
    expected = model(ids)
    stored = {n: t.clone() for n, t in load_file(copy / FILE).items() if not n.startswith("_")}
    del model
    save_file({**stored, "a": torch.zeros(1, dtype=torch.int8)}, copy / FILE)
    start, header = header_of(copy)
    assert any((start + e["data_offsets"][0]) % 64 for e in header.values())
    with_digest(lambda f: None)(copy)
    for found, wanted in zip(moe_mlir.load(copy)(ids), expected, strict=True):
        assert torch.equal(found, wanted)
    done = run(copy)
    assert done.returncode == 0, done.stderr
