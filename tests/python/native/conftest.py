"""Shared inputs of the tests of the native layer."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def moe():
    from moe_mlir._native import native

    return native()


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """No test reads or fills another one's cache."""
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("MOE_MLIR_CACHE", "MOE_MLIR_CACHE_READONLY", "MOE_MLIR_DUMP_DIR"):
        monkeypatch.delenv(name, raising=False)
    from moe_mlir.compiler import jit

    monkeypatch.setattr(jit, "_loaded", type(jit._loaded)())


# out[i, j] = scale * in[i, j] + shift
AFFINE = """
func.func @affine(%in: tensor<?x4xf32>, %scale: f32, %shift: i64) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %in, %c0 : tensor<?x4xf32>
  %empty = tensor.empty(%n) : tensor<?x4xf32>
  %shift_f = arith.sitofp %shift : i64 to f32
  %r = linalg.generic {
      indexing_maps = [affine_map<(n, d) -> (n, d)>, affine_map<(n, d) -> (n, d)>],
      iterator_types = ["parallel", "parallel"]}
      ins(%in : tensor<?x4xf32>) outs(%empty : tensor<?x4xf32>) {
  ^bb0(%x: f32, %unused: f32):
    %p = arith.mulf %x, %scale : f32
    %s = arith.addf %p, %shift_f : f32
    linalg.yield %s : f32
  } -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}
"""
