"""Calls of artifacts whose sizes do not agree: refused by every loader, not read past an end."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import PACKAGE, rewrite_manifest, run_tool

import moe_mlir
from moe_mlir.frontends import aot

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = PACKAGE / "libmoe_torch.so"

SELECT = """
func.func @select(%z: tensor<?x8xf32>, %mask: tensor<?xi1>) -> (tensor<?x3xf32>, tensor<?x3xi64>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x8xf32>
  %g = tensor.empty(%n) : tensor<?x3xf32>
  %i = tensor.empty(%n) : tensor<?x3xi64>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x8xf32>) mask(%mask : tensor<?xi1>)
      outs(%g, %i : tensor<?x3xf32>, tensor<?x3xi64>)
      {kind = #moe.score_kind<logits>} -> tensor<?x3xf32>, tensor<?x3xi64>
  return %r#0, %r#1 : tensor<?x3xf32>, tensor<?x3xi64>
}"""


def compile_to(folder, source, *options):
    (folder.parent / f"{folder.name}.mlir").write_text(source)
    done = run_tool("moe-compile", folder.parent / f"{folder.name}.mlir", "-o", folder, *options)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module", params=["cpu", "sm_90"])
def select(request, tmp_path_factory):
    return compile_to(tmp_path_factory.mktemp("select") / request.param, SELECT,
                      f"--target={request.param}")


# ---- calls ---------------------------------------------------------------------------


def places(rows, gates=torch.float32):
    return torch.empty(rows, 3, dtype=gates), torch.empty(rows, 3, dtype=torch.int64)


MISTAKES = {
    "a short mask": ((1000, 1, 1000), "size 0 of argument 1 to be 1000, by size 0 of argument 0, "
                                      "found 1"),
    "a long mask": ((10, 1000, 10), "size 0 of argument 1 to be 10, by size 0 of argument 0, found "
                                    "1000"),
    "no mask": ((10, 0, 10), "size 0 of argument 1 to be 10, by size 0 of argument 0, found 0"),
    "short results": ((1000, 1000, 1), r"result 0 of 'select': expected shape \[1000, 3\], found "
                                       r"\[1, 3\]"),
    "long results": ((2, 2, 3), r"result 0 of 'select': expected shape \[2, 3\], found \[3, 3\]"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_sizes_that_do_not_agree(select, case):
    (rows, masked, written), message = MISTAKES[case]
    loaded = moe_mlir.load(select)
    z, mask = torch.randn(rows, 8), torch.ones(masked, dtype=torch.bool)
    with moe_mlir.simulate():
        with pytest.raises(ValueError, match=message):
            loaded(z, mask, out=places(written))
        mask = torch.ones(rows, dtype=torch.bool)
        for found in (loaded(z, mask), loaded(z, mask, out=places(rows))):
            torch.testing.assert_close(found[0], moe_mlir.topk_renorm(z, 3, mask=mask)[0])


WRONG_PLACES = {
    "dtype": (places(4, torch.float64), TypeError, "expected float32, found float64"),
    "rank": ((torch.empty(12), places(4)[1]), ValueError, r"expected shape \[4, 3\], found \[12\]"),
    "strides": ((torch.empty(3, 4).T, places(4)[1]), ValueError, "to be contiguous, found strides"),
    "expanded": ((torch.empty(1, 1).expand(4, 3), places(4)[1]), ValueError, "to be contiguous"),
    "too few": (places(4)[:1], ValueError, "expected 2 buffers as out= for 'select', found 1"),
    "read-only": ((np.frombuffer(bytes(48), np.float32).reshape(4, 3), places(4)[1]), ValueError,
                  "to be writable, found a read-only array"),
    "no tensor": (([[0.0] * 3] * 4, places(4)[1]), TypeError, "expected a tensor, found list"),
    "elsewhere": ((torch.empty(4, 3, device="meta"), places(4)[1]), ValueError, "on one device, found them on"),
}


@pytest.mark.parametrize("case", WRONG_PLACES)
def test_results_that_cannot_be_written(select, case):
    out, kind, message = WRONG_PLACES[case]
    with moe_mlir.simulate(), pytest.raises(kind, match=message):
        moe_mlir.load(select)(torch.randn(4, 8), torch.ones(4, dtype=torch.bool), out=out)


def test_results_in_the_memory_of_others(select):
    loaded, memory = moe_mlir.load(select), torch.randn(60)
    z, mask = memory[:32].view(4, 8), torch.ones(4, dtype=torch.bool)
    own = places(4)
    with moe_mlir.simulate():
        for first in (0, 20, 31):
            shared = memory[first:first + 12].view(4, 3)
            with pytest.raises(ValueError, match="memory of its own for result 0 of 'select', "
                                                 "found that of argument 0"):
                loaded(z, mask, out=(shared, own[1]))
        bytes_ = torch.empty(96, dtype=torch.uint8)
        with pytest.raises(ValueError, match="result 1 of 'select', found that of result 0"):
            loaded(z, mask, out=(bytes_[:48].view(torch.float32).view(4, 3),
                                 bytes_.view(torch.int64).view(4, 3)))
        # Behind an argument is not in it, and nothing shares nothing.
        beside = memory[32:44].view(4, 3)
        loaded(z, mask, out=(beside, own[1]))
        assert torch.equal(beside, loaded(z, mask)[0])
        loaded(z[:0], mask[:0], out=(z[:0, :3], own[1][:0]))


def test_results_in_the_memory_of_arrays(select):
    loaded, memory = moe_mlir.load(select), np.zeros(60, np.float32)
    out = memory[:12].reshape(4, 3), np.empty((4, 3), np.int64)
    mask = np.ones(4, bool)
    with moe_mlir.simulate():
        with pytest.raises(ValueError, match="found that of argument 0"):
            loaded(memory[42:10:-1].reshape(4, 8), mask, out=out)
        loaded(memory[43:11:-1].reshape(4, 8), mask, out=out)


WRONG_ARGUMENTS = {
    "dtype": (torch.randn(4, 8).half(), TypeError, "argument 0 of 'select': expected float32, found"),
    "rank": (torch.randn(2, 2, 8), ValueError, r"argument 0 of 'select': expected shape \[\?, 8\]"),
    "static size": (torch.randn(4, 7), ValueError, r"expected shape \[\?, 8\], found \[4, 7\]"),
    "no tensor": (3.0, TypeError, "expected a tensor, found float"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_arguments_of_another_type(select, case):
    z, kind, message = WRONG_ARGUMENTS[case]
    with moe_mlir.simulate(), pytest.raises(kind, match=message):
        moe_mlir.load(select)(z, torch.ones(4, dtype=torch.bool))


def test_moe_run_refuses_them(select, tmp_path):
    np.save(tmp_path / "z.npy", np.zeros((1000, 8), np.float32))
    np.save(tmp_path / "mask.npy", np.ones(1, bool))
    device = "cpu" if select.name == "cpu" else "sim"
    done = run_tool("moe-run", select, "--input=z.npy", "--input=mask.npy", "--output=g.npy",
                    f"--device={device}", cwd=tmp_path)
    assert done.returncode == 1 and not (tmp_path / "g.npy").exists()
    assert done.stderr == ("moe-run: error: 'select': expected size 0 of argument 1 to be 1000, by "
                           "size 0 of argument 0, found 1\n")


LAST_ROWS = """
func.func private @cut(%x: tensor<?xf32>, %most: index) -> tensor<?xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?xf32>
  %over = arith.subi %n, %most : index
  %start = arith.maxsi %over, %c0 : index
  %count = arith.subi %n, %start : index
  %last = tensor.extract_slice %x[%start] [%count] [1] : tensor<?xf32> to tensor<?xf32>
  return %last : tensor<?xf32>
}
func.func @last_rows(%x: tensor<?xf32>, %y: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>, tensor<?xf32>) {
  %c0 = arith.constant 0 : index
  %c3 = arith.constant 3 : index
  %n = tensor.dim %x, %c0 : tensor<?xf32>
  %most = arith.minsi %n, %c3 : index
  %over = arith.subi %n, %most : index
  %last = tensor.extract_slice %x[%over] [%most] [1] : tensor<?xf32> to tensor<?xf32>
  %m = tensor.dim %y, %c0 : tensor<?xf32>
  %place = tensor.empty(%most) : tensor<?xf32>
  %half = arith.floordivsi %n, %c3 : index
  %more = arith.addi %half, %c3 : index
  %quotient = arith.floordivsi %n, %more : index
  %nothing = tensor.empty(%quotient) : tensor<?xf32>
  %cut = func.call @cut(%y, %c3) : (tensor<?xf32>, index) -> tensor<?xf32>
  %sum = linalg.add ins(%last, %cut : tensor<?xf32>, tensor<?xf32>)
      outs(%place : tensor<?xf32>) -> tensor<?xf32>
  return %last, %sum, %nothing : tensor<?xf32>, tensor<?xf32>, tensor<?xf32>
}"""


def test_sizes_that_are_the_smaller_of_two(tmp_path):
    """As of a window, which is full or not."""
    folder = compile_to(tmp_path / "rows", LAST_ROWS, "--target=cpu")
    (function,) = json.loads((folder / "manifest.json").read_text())["functions"]
    assert function["results"][0]["sizes"] == [["min", ["arg", 0, 0], 3]]
    assert function["results"][2]["sizes"][0][0] == "//"
    loaded = moe_mlir.load(folder)
    for rows in (0, 2, 3, 7):
        x = torch.randn(rows)
        last, total, quotient = loaded(x, x)
        assert quotient.shape[0] == rows // (rows // 3 + 3) and torch.equal(last, x[-3:]) and torch.equal(total, 2 * x[-3:])
        with pytest.raises(ValueError, match="result 0 of 'last_rows': expected shape"):
            loaded(x, x, out=(torch.empty(rows + 4), torch.empty(min(rows, 3)),
                                torch.empty(rows // (rows // 3 + 3))))


CALLER = r"""#include "MoE/Runtime/Artifact.h"
#include <cstdio>
#include <exception>
using namespace moe::runtime;
static float scores[80];
static bool mask[10];
static float gates[30];
static int64_t ids[30];
static void call(const Function &f, int64_t rows, int64_t masked, int64_t gated, int64_t found,
                 void *z = scores, void *g = gates, bool isOnDevice = false) {
  Tensor in[] = {{"f32", {rows, 8}, z, isOnDevice}, {"i1", {masked}, mask}};
  Tensor out[] = {{"f32", {gated, 3}, g}, {"i64", {found, 3}, ids}};
  try {
    f.run(in, out);
    std::puts("ran");
  } catch (const std::exception &error) {
    std::puts(error.what());
  }
}
int main(int, char **argv) {
  Artifact artifact(argv[1], argv[2]);
  const Function &f = artifact.getFunction();
  call(f, 10, 10, 10, 10);
  call(f, 10, 1, 10, 10);
  call(f, 10, 10, 1, 10);
  call(f, 10, 10, 10, 11);
  call(f, 10, 10, 10, 10, nullptr);
  call(f, 10, 10, 10, 10, scores, nullptr);
  call(f, 10, 10, 10, 10, scores, scores + 79);
  call(f, 10, 10, 10, 10, scores, ids);
  call(f, 0, 0, 0, 0, nullptr, nullptr);
  call(f, -1, -1, -1, -1);
  call(f, INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX);
  if (!artifact.getDevice())
    call(f, 10, 10, 10, 10, scores, gates, true);
}
"""
SAID = """ran
'select': expected size 0 of argument 1 to be 10, by size 0 of argument 0, found 1
expected result 0 of 'select' to be f32[10, 3] for these arguments, found f32[1, 3]
expected result 1 of 'select' to be i64[10, 3] for these arguments, found i64[11, 3]
expected argument 0 of 'select' to have memory, found a null pointer
expected result 0 of 'select' to have memory, found a null pointer
expected memory of its own for result 0 of 'select', found that of argument 0 of 'select'
expected memory of its own for result 1 of 'select', found that of result 0 of 'select'
ran
expected sizes whose product is a size, found a negative or too large one
expected sizes whose product is a size, found a negative or too large one
"""


def test_callers_of_cpp_are_refused(select, tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "expected the C++ compiler that built the package"
    (tmp_path / "main.cpp").write_text(CALLER)
    subprocess.run([compiler, "-std=c++20", f"-I{ROOT / 'include'}", "main.cpp", "-o", "main",
                    str(PACKAGE / "libmoe_runtime.so"), f"-Wl,-rpath,{PACKAGE}"], check=True,
                   cwd=tmp_path)
    on_cpu = select.name == "cpu"
    done = subprocess.run([tmp_path / "main", select, "cpu" if on_cpu else "sim"], text=True,
                          capture_output=True)
    of_device = ("expected the tensors of 'select' in the memory of this process, found one on a "
                 "device\n")
    assert (done.returncode, done.stdout) == (0, SAID + of_device * on_cpu), done


def test_a_manifest_that_asks_for_less_than_the_code_is_refused(tmp_path):
    folder = compile_to(tmp_path / "cpu", SELECT)
    rewrite_manifest(folder, lambda m: m["functions"][0].update(relations=[]))
    done = run_tool("moe-run", folder, "--device=cpu")
    assert done.returncode == 1 and "to take and give what the manifest says" in done.stderr


# ---- torch programs ------------------------------------------------------------------


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, x, y):
        return x * self.weight + y


def test_programs_check_what_they_write(tmp_path):
    rows = torch.export.Dim("rows", min=2, max=2000)
    model, x = Sum(), torch.randn(1000, 8)
    torch.export.save(torch.export.export(model, (x, x.clone()), dynamic_shapes=({0: rows},) * 2),
                      tmp_path / "sum.pt2")
    done = run_tool("moe-compile", tmp_path / "sum.pt2", "-o", tmp_path / "sum")
    assert done.returncode == 0, done.stderr
    loaded = moe_mlir.load(tmp_path / "sum")
    out = torch.empty(1000, 8)
    assert loaded(x, x, out=out) is out and torch.equal(out, model(x, x))
    with pytest.raises(ValueError, match="result 0 of 'main', found that of argument"):
        loaded(out, x, out=out)
    for rows in (1, 999, 1001):
        with pytest.raises(ValueError, match=rf"expected shape \[1000, 8\], found \[{rows}, 8\]"):
            loaded(x, x, out=torch.empty(rows, 8))
    with pytest.raises(TypeError, match="result 0 of 'main': expected float32, found float16"):
        loaded(x, x, out=torch.empty(1000, 8).half())


def test_weights_have_the_sizes_that_were_compiled(tmp_path):
    model, x = Sum(), torch.randn(3, 8)
    torch.export.save(torch.export.export(model, (x, x.clone())), tmp_path / "sum.pt2")
    done = run_tool("moe-compile", tmp_path / "sum.pt2", "-o", tmp_path / "sum")
    assert done.returncode == 0, done.stderr
    weights = tmp_path / "sum/weights.safetensors"
    data = weights.read_bytes().replace(b'"shape":[8]', b'"shape":[4]').replace(
        b'"data_offsets":[0,32]', b'"data_offsets":[0,16]')
    weights.write_bytes(data)
    rewrite_manifest(tmp_path / "sum", lambda m: m["files"]["weights.safetensors"].update(
        sha256=hashlib.sha256(data).hexdigest()))
    with pytest.raises(ValueError, match=r"'weight': expected shape \[8\], found \[4\]"):
        moe_mlir.load(tmp_path / "sum")


# ---- what is asked -------------------------------------------------------------------

RELATIONS = {
    "elementwise": ("""func.func @f(%a: tensor<?x?xf32>, %b: tensor<?x?xf32>) -> tensor<?x?xf32> {
        %r = linalg.add ins(%a, %b : tensor<?x?xf32>, tensor<?x?xf32>) outs(%a : tensor<?x?xf32>) -> tensor<?x?xf32>
        return %r : tensor<?x?xf32>
      }""", [[["arg", 1, 0], "==", ["arg", 0, 0]], [["arg", 1, 1], "==", ["arg", 0, 1]]]),
    "a product": ("""func.func @f(%a: tensor<?x?xf32>, %b: tensor<?x?xf32>, %c: tensor<?x?xf32>)
          -> tensor<?x?xf32> {
        %r = linalg.matmul ins(%a, %b : tensor<?x?xf32>, tensor<?x?xf32>)
            outs(%c : tensor<?x?xf32>) -> tensor<?x?xf32>
        return %r : tensor<?x?xf32>
      }""", [[["arg", 1, 0], "==", ["arg", 0, 1]], [["arg", 2, 0], "==", ["arg", 0, 0]],
             [["arg", 2, 1], "==", ["arg", 1, 1]]]),
    "a cast": ("""func.func @f(%a: tensor<?xf32>) -> tensor<4xf32> {
        %r = tensor.cast %a : tensor<?xf32> to tensor<4xf32>
        return %r : tensor<4xf32>
      }""", [[["arg", 0, 0], "==", 4]]),
    "a window": ("""func.func @f(%x: tensor<?xf32>, %k: tensor<?xf32>, %y: tensor<?xf32>)
          -> tensor<?xf32> {
        %r = linalg.conv_1d ins(%x, %k : tensor<?xf32>, tensor<?xf32>)
            outs(%y : tensor<?xf32>) -> tensor<?xf32>
        return %r : tensor<?xf32>
      }""", [[["+", ["arg", 2, 0], ["+", ["arg", 1, 0], -1]], "<=", ["arg", 0, 0]]]),
    "a slice": ("""func.func @f(%a: tensor<?xf32>, %from: index) -> tensor<4xf32> {
        %r = tensor.extract_slice %a[%from] [4] [1] : tensor<?xf32> to tensor<4xf32>
        return %r : tensor<4xf32>
      }""", [[0, "<=", ["arg", 1]], [["+", ["arg", 1], 4], "<=", ["arg", 0, 0]]]),
    "joined dims": ("""func.func @f(%a: tensor<?x?xf32>, %b: tensor<?xf32>) -> tensor<?xf32> {
        %j = tensor.collapse_shape %a [[0, 1]] : tensor<?x?xf32> into tensor<?xf32>
        %r = linalg.add ins(%j, %b : tensor<?xf32>, tensor<?xf32>) outs(%j : tensor<?xf32>) -> tensor<?xf32>
        return %r : tensor<?xf32>
      }""", [[["arg", 1, 0], "==", ["*", ["arg", 0, 0], ["arg", 0, 1]]]]),
    "a function that is called": ("""func.func private @add(%a: tensor<?xf32>, %b: tensor<?xf32>)
          -> tensor<?xf32> {
        %r = linalg.add ins(%a, %b : tensor<?xf32>, tensor<?xf32>) outs(%a : tensor<?xf32>) -> tensor<?xf32>
        return %r : tensor<?xf32>
      }
      func.func @f(%a: tensor<?xf32>, %b: tensor<?xf32>) -> tensor<?xf32> {
        %r = call @add(%b, %a) : (tensor<?xf32>, tensor<?xf32>) -> tensor<?xf32>
        return %r : tensor<?xf32>
      }""", [[["arg", 1, 0], "==", ["arg", 0, 0]]]),
    "an order": ("""func.func @f(%z: tensor<?x?xf32>, %k: index) -> tensor<?x?xf32> {
        %c0 = arith.constant 0 : index
        %n = tensor.dim %z, %c0 : tensor<?x?xf32>
        %g = tensor.empty(%n, %k) : tensor<?x?xf32>
        %i = tensor.empty(%n, %k) : tensor<?x?xi64>
        %r:2 = moe.topk_renorm ins(%z : tensor<?x?xf32>)
            outs(%g, %i : tensor<?x?xf32>, tensor<?x?xi64>)
            {kind = #moe.score_kind<logits>} -> tensor<?x?xf32>, tensor<?x?xi64>
        return %r#0 : tensor<?x?xf32>
      }""", [[["arg", 1], "<=", ["arg", 0, 1]]]),
    "nothing": ("""func.func @f(%a: tensor<?xf32>) -> tensor<?xf32> {
        %r = linalg.exp ins(%a : tensor<?xf32>) outs(%a : tensor<?xf32>)
            -> tensor<?xf32>
        return %r : tensor<?xf32>
      }""", []),
}


@pytest.mark.parametrize("case", RELATIONS)
def test_what_a_function_asks_of_sizes(case, tmp_path):
    source, expected = RELATIONS[case]
    folder = compile_to(tmp_path / "f", source)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["functions"][0]["relations"] == expected
    assert moe_mlir.load(folder).functions and "f" in run_tool("moe-run", folder, "--list").stdout


def test_an_order_is_checked(tmp_path):
    folder = compile_to(tmp_path / "f", RELATIONS["an order"][0])
    loaded = moe_mlir.load(folder)
    assert loaded(torch.randn(5, 8), 8).shape == (5, 8)
    with pytest.raises(ValueError, match="expected argument 1 to be at most 8, by size 1 of argument 0"
                                         ", found 9"):
        loaded(torch.randn(5, 8), 9)


# ---- torch ops of C++ ----------------------------------------------------------------

LOADER = r"""#include "MoE/Torch/Kernels.h"
extern "C" void load(const char *folder) { moe::torch_ops::loadKernels(folder); }
"""
PROGRAM = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
ctypes.CDLL(sys.argv[2]).load(sys.argv[3].encode())
z = torch.randn(2, 500, 8)
def call(mask, forced=None):
    try:
        gates, _ = torch.ops.moe.topk_renorm(z, 2, "logits", True, 1.0, mask, torch.int64)
        print(tuple(gates.shape))
    except RuntimeError as error:
        print(str(error).splitlines()[0])
call(torch.ones(2, 500, dtype=torch.bool))
call(torch.ones(1, dtype=torch.bool))
call(torch.ones(1000, dtype=torch.bool))
try:
    torch.ops.moe.grouped_topk(z, 2, None, torch.zeros(1, 2, dtype=torch.int64), None, None, "softmax",
                               1, 1, "max", True, 0.0, 1.0, torch.int64)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


class Masked(torch.nn.Module):
    def forward(self, z, mask):
        return moe_mlir.topk_renorm(z, 2, mask=mask)


def test_torch_ops_of_cpp_check_masks(tmp_path):
    if not LIBRARY.exists():
        pytest.skip("built without torch")
    program = torch.export.export(Masked(), (torch.randn(4, 8), torch.ones(4, dtype=torch.bool)))
    aot._write_artifact(aot.find_kernels(program), tmp_path / "kernels")
    (tmp_path / "load.cpp").write_text(LOADER)
    compiler = shutil.which("c++") or shutil.which("g++")
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", f"-I{ROOT / 'include'}", "load.cpp",
                    "-o", "load.so", str(LIBRARY), f"-Wl,-rpath,{PACKAGE}"], check=True, cwd=tmp_path)
    (tmp_path / "main.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, tmp_path / "main.py", LIBRARY, tmp_path / "load.so",
                           tmp_path / "kernels"], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "(2, 500, 2)",
        "expected mask to have the leading dims [2, 500] of scores, found [1]",
        "expected mask to have the leading dims [2, 500] of scores, found [1000]",
        "expected forced to have the leading dims [2, 500] of scores, found [1]",
    ], done
