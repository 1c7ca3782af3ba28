"""Artifacts of moe-compile, loaded from Python."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from conftest import AFFINE
from support import rewrite_manifest, run_tool, tool_of

from moe_mlir import artifact
from moe_mlir._native import native
from moe_mlir._support.tools import find_tool
from moe_mlir.gpu.sizes import evaluate_expression

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def moe_compile():
    path = shutil.which("moe-compile")
    if path is None:
        # Beside the build tree's package.
        library = Path(native().__file__)
        path = library.parents[2] / "bin" / "moe-compile"
    if not os.access(path, os.X_OK):
        pytest.skip("moe-compile is not in PATH and not in the build tree")

    def run(source, output, *options, check=True, source_file="-", fresh=False):
        tool = tool_of("moe-compile", source_file, fresh=fresh) if source_file != "-" else path
        result = subprocess.run([tool, source_file, "-o", output, *options], input=source, text=True,
                                capture_output=True, timeout=120)
        assert not check or result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def folder(moe_compile, tmp_path):
    moe_compile(AFFINE, tmp_path / "affine.moe")
    return tmp_path / "affine.moe"


def test_runs_on_torch_and_numpy(folder):
    loaded = artifact.load(folder)
    x = torch.randn(3, 4)
    result = loaded(x, 2.0, 1)
    assert isinstance(result, torch.Tensor) and torch.equal(result, x * 2 + 1)
    array = loaded(x.numpy(), 2.0, 1)
    assert isinstance(array, numpy.ndarray)
    numpy.testing.assert_array_equal(array, result)
    out = torch.empty(3, 4)
    assert loaded(x, 2.0, 1, out=out) is out and torch.equal(out, result)


def test_strided_arguments_and_a_short_repr(folder):
    loaded = artifact.load(folder)
    x = torch.randn(4, 3).t()
    assert torch.equal(loaded(x, 2.0, 1), x * 2 + 1)
    numpy.testing.assert_array_equal(loaded(x.numpy(), 2.0, 1), x * 2 + 1)
    assert repr(loaded).startswith("<artifact for cpu: <compiled affine(") and len(repr(loaded)) < 200


def test_a_torch_program_takes_its_inputs_by_name(moe_compile, tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4))

        def forward(self, x, shift):
            return x * self.weight + shift
    model, x, shift = Scaled(), torch.randn(3, 4), torch.randn(4, 3).t()
    torch.export.save(torch.export.export(model, (x, x.clone())), tmp_path / "scaled.pt2")
    moe_compile("", tmp_path / "scaled.moe", source_file=tmp_path / "scaled.pt2")
    loaded = artifact.load(tmp_path / "scaled.moe")
    for found in (loaded(x, shift), loaded(x, shift=shift), loaded(shift=shift, x=x)):
        torch.testing.assert_close(found, model(x, shift))
    with pytest.raises(TypeError, match=r"input 'shift': expected float32, found float64"):
        loaded(x, shift.double())
    with pytest.raises(ValueError, match=r"input 'x': expected shape \[3, 4\], found \[3, 5\]"):
        loaded(torch.randn(3, 5), shift)
    with pytest.raises(TypeError, match=r"expected the inputs \['x', 'shift'\], found 1 positional"):
        loaded(x, y=x)


def test_weights_are_imported_beside_the_output(moe_compile, tmp_path, monkeypatch):
    """Not in the system's temporary folder, which may be too small for them."""
    linear = torch.nn.Linear(4, 4)
    torch.export.save(torch.export.export(linear, (torch.randn(3, 4),)), tmp_path / "linear.pt2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    moe_compile("", "linear.moe", source_file="linear.pt2")
    assert {path.name for path in tmp_path.iterdir()} == {"linear.pt2", "linear.moe"}


def test_the_manifest_describes_the_function(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["target"]["name"] == "cpu"
    (function,) = manifest["functions"]
    assert function["name"] == "affine" and function["symbol"] == "_mlir_ciface_affine"
    assert function["arguments"] == [{"dtype": "f32", "shape": [-1, 4]}, {"dtype": "f32"},
                                     {"dtype": "i64"}]
    assert function["results"] == [
        {"dtype": "f32", "shape": [-1, 4], "sizes": [["arg", 0, 0], 4]}]
    assert sorted(manifest["files"]) == ["kernel.h", "kernel.o"]


def test_sizes_are_computed_from_the_arguments(moe_compile, tmp_path):
    moe_compile("""func.func @f(%x: tensor<?x?xf32>) -> (tensor<?xf32>, tensor<?x?xf32>) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %c3 = arith.constant 3 : index
      %n = tensor.dim %x, %c0 : tensor<?x?xf32>
      %d = tensor.dim %x, %c1 : tensor<?x?xf32>
      %n3 = arith.muli %n, %c3 : index
      %s = arith.addi %n3, %d : index
      %one = arith.constant 1.0 : f32
      %e = tensor.empty(%s) : tensor<?xf32>
      %a = linalg.fill ins(%one : f32) outs(%e : tensor<?xf32>) -> tensor<?xf32>
      %e2 = tensor.empty(%d, %n) : tensor<?x?xf32>
      %t = linalg.transpose ins(%x : tensor<?x?xf32>) outs(%e2 : tensor<?x?xf32>)
        permutation = [1, 0]
      return %a, %t : tensor<?xf32>, tensor<?x?xf32>
    }""", tmp_path / "f.moe")
    x = torch.randn(5, 2)
    ones, transposed = artifact.load(tmp_path / "f.moe")(x)
    assert torch.equal(ones, torch.ones(17))
    assert torch.equal(transposed, x.T)


@pytest.mark.parametrize("size, expected", [
    (7, 7), (None, None), (["arg", 0, 1], 4), (["arg", 1], 9), (["arg", 5, 0], None),
    (["+", ["arg", 5, 0], 1], None), (["+", ["*", ["arg", 0, 0], 2], 1], 7), (["//", ["arg", 1], 2], 4),
    (["ceildiv", ["arg", 1], 2], 5), (["%", ["arg", 1], 4], 1),
    (["max", ["+", ["arg", 1], -12], 0], 0), (["min", ["arg", 1], ["arg", 0, 0]], 3)])
def test_evaluates_sizes(size, expected):
    assert evaluate_expression(size, (torch.empty(3, 4), 9)) == expected


def test_the_header_compiles_and_links(folder, tmp_path):
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    runtime = next((p for p in Path(native().__file__).parents[2].rglob(
        "libmoe_runtime.so")), None)
    assert runtime is not None, "expected libmoe_runtime.so in the build tree"
    (tmp_path / "main.c").write_text("""#include "kernel.h"
      #include <stdio.h>
      int main(void) {
        float in[8] = {0, 1, 2, 3, 4, 5, 6, 7}, out[8] = {0};
        MoETensor2 x = {in, in, 0, {2, 4}, {4, 1}}, y = {out, out, 0, {2, 4}, {4, 1}};
        _mlir_ciface_affine(&x, 2.0f, 1, &y);
        printf("%g %g\\n", out[0], out[7]);
        return 0;
      }""")
    subprocess.run([compiler, "-Wall", "-Werror", f"-I{folder}", "-o", tmp_path / "main",
                    tmp_path / "main.c", folder / "kernel.o", runtime, "-lm",
                    f"-Wl,-rpath,{runtime.parent}"], check=True)
    result = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True)
    assert result.stdout == "1 15\n"


def test_an_older_artifact_is_replaced_and_nothing_else(moe_compile, folder, tmp_path):
    before = (folder / "manifest.json").stat().st_ino
    moe_compile(AFFINE, folder)
    assert (folder / "manifest.json").stat().st_ino != before
    assert artifact.load(folder)
    other = tmp_path / "precious"
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    result = moe_compile(AFFINE, other, check=False)
    assert result.returncode == 1 and "found something else" in result.stderr
    assert (other / "thesis.tex").read_text() == "years"
    assert not list(tmp_path.glob("*staging*"))


FOREIGN = {
    "another manifest": ({"manifest.json": '{"name": "shop", "version": "1.0"}', "app.js": "x"},
                         "found something else"),
    "a manifest that is no object": ({"manifest.json": "[]"}, "found something else"),
    "no JSON": ({"manifest.json": "format: moe-mlir-artifact"}, "found something else"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_with_a_manifest_of_others_is_kept(moe_compile, tmp_path, case):
    """Web apps, extensions and many other folders have a manifest.json."""
    files, message = FOREIGN[case]
    folder = tmp_path / "app"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    result = moe_compile(AFFINE, folder, check=False)
    assert result.returncode == 1 and message in result.stderr
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_an_artifact_with_a_file_of_others_is_kept(moe_compile, folder, tmp_path, kind):
    notes = folder / "notes.txt"
    if kind == "file":
        notes.write_text("mine")
    elif kind == "folder":
        notes.mkdir()
    else:
        notes.symlink_to(tmp_path)
    before = {path.name: path.lstat().st_ino for path in folder.iterdir()}
    result = moe_compile(AFFINE, folder, check=False)
    assert result.returncode == 1 and "found 'notes.txt' in it" in result.stderr
    assert {path.name: path.lstat().st_ino for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_link_to_an_artifact_stays_one(moe_compile, folder, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(folder.name)
    before = (folder / "manifest.json").stat().st_ino
    moe_compile(AFFINE, link)
    assert link.is_symlink() and (folder / "manifest.json").stat().st_ino != before
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, "latest"]


def test_a_failed_write_leaves_the_old_artifact(moe_compile, folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    limited = f"ulimit -f 1; trap '' XFSZ; exec {find_tool('moe-compile')} - -o {folder} --cpu=x86-64"
    result = subprocess.run(["bash", "-c", limited], input=AFFINE, text=True, capture_output=True)
    assert result.returncode == 1 and "cannot write" in result.stderr, result
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("emit", ["mlir", "llvm", "asm"])
def test_a_failed_write_leaves_the_old_file(moe_compile, tmp_path, emit):
    """ulimit -f is a full disk that needs no file system of its own."""
    path = tmp_path / "code.txt"
    path.write_text("what was there")
    body = "".join(f"%a{i} = arith.addf %a{i - 1}, %a0 : f32\n" for i in range(1, 100))
    source = f"func.func @f(%a0: f32) -> f32 {{\n{body} return %a99 : f32\n}}"
    limited = f"ulimit -f 1; trap '' XFSZ; exec {find_tool('moe-compile')} - -o {path} --emit={emit}"
    result = subprocess.run(["bash", "-c", limited], input=source, text=True, capture_output=True)
    assert result.returncode == 1 and "cannot write" in result.stderr, result
    assert path.read_text() == "what was there" and list(tmp_path.iterdir()) == [path]


def test_the_input_is_not_the_output(moe_compile, tmp_path):
    source = tmp_path / "affine.mlir"
    source.write_text(AFFINE)
    result = moe_compile("", source, "--emit=llvm", source_file=source, check=False)
    assert result.returncode == 1 and "expected another file with -o than the input" in result.stderr
    assert source.read_text() == AFFINE


def test_a_module_that_failed_takes_no_file_of_the_user(moe_compile, tmp_path):
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.randn(3, 4),)),
                      tmp_path / "linear.pt2")
    (tmp_path / "out.failed.mlir").write_text("mine")
    for expected in ("out.failed-2.mlir", "out.failed-3.mlir"):
        result = moe_compile("", tmp_path / "out", "--cpu=zx81", check=False,
                             source_file=tmp_path / "linear.pt2")
        assert result.returncode == 1 and f"{tmp_path / expected};" in result.stderr
    assert (tmp_path / "out.failed.mlir").read_text() == "mine"


def test_modules_in_the_working_folder_are_not_imported(moe_compile, tmp_path, monkeypatch):
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.randn(3, 4),)),
                      tmp_path / "linear.pt2")
    for name in ("torch", "zipfile", "moe_mlir"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the working folder ran')")
    monkeypatch.chdir(tmp_path)
    moe_compile("", tmp_path / "out", source_file=tmp_path / "linear.pt2", fresh=True)


def test_a_pipe_instead_of_a_file_is_refused(folder):
    """Whoever opens one waits for its writer."""
    for name in ("kernel.o", "manifest.json.sha256", "manifest.json"):
        (folder / name).rename(folder / "aside")
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match="expected a regular file"):
            artifact.load(folder)
        done = run_tool("moe-run", folder, "--list")
        assert done.returncode == 1 and "found no such file that can be read" in done.stderr
        (folder / name).unlink()
        (folder / "aside").rename(folder / name)
    assert artifact.load(folder)


@pytest.mark.parametrize("name, change, message", [
    ("kernel.o", lambda d: d[:-1] + bytes([d[-1] ^ 1]), "is damaged"),
    ("kernel.h", lambda d: d + b"\n", "is damaged"),
    ("manifest.json", lambda d: b"{", "expected JSON"),
    ("manifest.json", lambda d: b"[]", "found another file"),
    ("manifest.json", lambda d: d.replace(b'"format_version": 2', b'"format_version": 9'),
     "found 9"),
    ("manifest.json", lambda d: b"[" * 100000, "expected JSON"),
    ("manifest.json", lambda d: d.replace(b"-1", b" 3"), "manifest.json to have SHA-256"),
    ("manifest.json.sha256", lambda d: b"", "manifest.json to have SHA-256"),
])
def test_a_damaged_artifact_is_refused(folder, name, change, message):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        artifact.load(folder)


def _relocations(code):
    """Where the object file's relocations are: 24 bytes each (Elf64_Rela)."""
    start, = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    for section in range(start, start + count * size, size):
        if struct.unpack_from("<I", code, section + 4)[0] == 4:  # SHT_RELA
            offset, length = struct.unpack_from("<QQ", code, section + 24)
            yield from range(offset, offset + length, 24)


def test_a_relocation_without_a_name_is_refused(moe_compile, tmp_path):
    folder = tmp_path / "router.moe"
    moe_compile((ROOT / "utils/fuzz/corpus/artifacts/router.mlir").read_text(), folder)
    path = folder / "kernel.o"
    code = bytearray(path.read_bytes())
    relocations = list(_relocations(code))
    assert relocations
    for place in relocations:
        code[place + 12:place + 16] = bytes(4)  # the symbol without a name
    path.write_bytes(code)
    digest = hashlib.sha256(code).hexdigest()
    rewrite_manifest(folder, lambda m: m["files"]["kernel.o"].update(sha256=digest))
    done = run_tool("moe-run", folder)
    assert done.returncode == 1 and "relocation to a symbol without one" in done.stderr


def test_files_outside_of_the_artifact_are_refused(folder):
    rewrite_manifest(folder, lambda m: m["files"].update({"../kernel.h": {}}))
    with pytest.raises(ValueError, match="plain file names"):
        artifact.load(folder)


def test_a_feature_that_no_cpu_lists_as_absent_is_no_reason(folder):
    rewrite_manifest(folder, lambda m: m["target"].update(features="+no-such-thing"))
    assert artifact.load(folder)


def test_code_for_another_cpu_is_refused(folder):
    host = native().host_cpu()[1].split(",")
    absent = next(f[1:] for f in host if f.startswith("-"))
    rewrite_manifest(folder, lambda m: m["target"].update(features=f"+{absent}"))
    with pytest.raises(ValueError, match=f"which has {absent}"):
        artifact.load(folder)


def test_no_artifact_at_all(tmp_path):
    with pytest.raises(ValueError, match="expected an artifact folder"):
        artifact.load(tmp_path / "none")
