"""Products of matrices: right for any sizes, and the same bits whatever surrounds a row."""

import itertools
import os

import pytest
import torch
from support import run_python

from moe_mlir.compiler.jit import compile_cached
from moe_mlir.ops._kernel import ELEMENT_TYPES

LAYOUTS = {"n, k": "(n, k)", "k, n": "(k, n)"}


def product(n, k, dtype, layout):
    """x [?, k] by a constant weight, in f32."""
    element = ELEMENT_TYPES[dtype]
    weight = f"tensor<{n}x{k}x{element}>" if layout == "n, k" else f"tensor<{k}x{n}x{element}>"
    x = f"tensor<?x{k}x{element}>"
    widen = "" if dtype is torch.float32 else "\n".join(
        f"%{to} = arith.extf %{name} : {element} to f32" for name, to in (("a", "aw"), ("b", "bw")))
    a, b = ("%a", "%b") if dtype is torch.float32 else ("%aw", "%bw")
    return f"""
    func.func @product(%x: {x}, %w: {weight}) -> tensor<?x{n}xf32> {{
      %c0 = arith.constant 0 : index
      %zero = arith.constant 0.0 : f32
      %m = tensor.dim %x, %c0 : {x}
      %empty = tensor.empty(%m) : tensor<?x{n}xf32>
      %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<?x{n}xf32>) -> tensor<?x{n}xf32>
      %y = linalg.generic {{
          indexing_maps = [affine_map<(m, n, k) -> (m, k)>,
                           affine_map<(m, n, k) -> {LAYOUTS[layout]}>,
                           affine_map<(m, n, k) -> (m, n)>],
          iterator_types = ["parallel", "parallel", "reduction"]}}
          ins(%x, %w : {x}, {weight}) outs(%zeros : tensor<?x{n}xf32>) {{
      ^bb0(%a: {element}, %b: {element}, %sum: f32):
        {widen}
        %p = arith.mulf {a}, {b} : f32
        %s = arith.addf %sum, %p : f32
        linalg.yield %s : f32
      }} -> tensor<?x{n}xf32>
      return %y : tensor<?x{n}xf32>
    }}"""


def run(function, x, w, n):
    y = torch.full((x.shape[0], n), float("nan"))
    function(x.contiguous(), w, y)
    return y


# No multiples of anything, a chain and more, whole panels, columns that a kernel keeps whole.
SIZES = [(1, 1), (5, 7), (33, 17), (70, 300), (64, 256), (530, 513)]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_rows_have_the_same_bits_in_any_company(dtype, n, k):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(40, k, generator=generator).to(dtype)
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    exact = x.double() @ w.double().T
    results = []
    for layout in LAYOUTS:
        function = compile_cached(product(n, k, dtype, layout)).function("product")
        weight = w if layout == "n, k" else w.T.contiguous()
        whole = run(function, x, weight, n)
        torch.testing.assert_close(whole.double(), exact, rtol=0, atol=2e-6 * exact.abs().max())
        for rows in (0, 1, 2, 5, 6, 7, 8, 13, 25):
            assert torch.equal(run(function, x[:rows], weight, n), whole[:rows]), (layout, rows)
        results.append(whole)
    assert torch.equal(*results)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [33, 34])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_and_missing_numbers_stay_in_their_rows_and_columns(dtype, k, layout):
    n = 70
    x, w = torch.ones(9, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
    x[2, k - 1], x[5, 0], w[69, 3], w[1, k - 1] = float("inf"), float("nan"), float("inf"), -1.0
    function = compile_cached(product(n, k, dtype, layout)).function("product")
    y = run(function, x, w if layout == "n, k" else w.T.contiguous(), n)
    torch.testing.assert_close(y, x.float() @ w.float().T, equal_nan=True)


SCRIPT = """
import sys, torch
from moe_mlir.compiler.jit import compile_cached
sys.path[:0] = [{folder!r}, {folder!r} + "/.."]
import test_products as t
torch.manual_seed(0)
x, w = torch.randn(37, 300), torch.randn(1100, 300)
y = t.run(compile_cached(t.product(1100, 300, torch.float32, "n, k")).function("product"), x, w, 1100)
torch.save(y, {path!r})
"""


def test_threads_share_columns_without_a_difference(tmp_path):
    results = []
    for threads in (1, 2, 3):
        path = str(tmp_path / f"{threads}.pt")
        code = SCRIPT.format(folder=str(__file__).rsplit("/", 1)[0], path=path)
        run_python("-c", code, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
        results.append(torch.load(path))
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(results))
