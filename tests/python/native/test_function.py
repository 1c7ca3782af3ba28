"""Compiled functions: results, argument checks, threads."""

import os
import subprocess
import sys
import threading

import numpy
import pytest
import torch
from conftest import AFFINE


@pytest.fixture(scope="module")
def affine(moe):
    return moe.Executable(moe.compile_object(AFFINE)).function("affine")


def call(function, x, scale=2.0, shift=3):
    out = torch.full(x.shape, float("nan"))
    function(x, scale, shift, out)
    return out


@pytest.mark.parametrize("n", [0, 1, 5, 1000])
def test_matches_torch(affine, n):
    x = torch.randn(n, 4)
    assert torch.equal(call(affine, x), x * 2 + 3)


def test_views_with_an_offset_are_read_in_place(affine):
    x = torch.randn(10, 4)[3:7]
    assert x.storage_offset()
    assert torch.equal(call(affine, x), x * 2 + 3)


def test_numpy_arrays_work_without_a_copy(affine):
    x, out = numpy.random.rand(6, 4).astype("float32"), numpy.empty((6, 4), "float32")
    affine(x, 2.0, 3, out)
    numpy.testing.assert_array_equal(out, x * 2 + 3)


def test_parameters_and_tensors_with_gradients_are_inputs(affine):
    x = torch.nn.Parameter(torch.randn(2, 4))
    assert torch.equal(call(affine, x), (x * 2 + 3).detach())


def test_scalars_convert(affine):
    x = torch.ones(1, 4)
    assert call(affine, x, numpy.float32(0.5), numpy.int32(-7))[0, 0] == -6.5
    assert call(affine, x, torch.tensor(0.5), torch.tensor(-7))[0, 0] == -6.5


def test_describes_itself(affine):
    assert affine.signature == "affine(tensor<?x4xf32>, f32, i64) -> (tensor<?x4xf32>)"
    assert affine.arguments == [("f32", (-1, 4)), ("f32", None), ("i64", None)]
    assert affine.results == [("f32", (-1, 4))]


X, OUT = torch.zeros(2, 4), torch.zeros(2, 4)


@pytest.mark.parametrize("arguments, error, message", [
    ((X, 1.0, 1), TypeError, "expected 3 arguments and 1 result buffers for 'affine', found 3"),
    ((X.double(), 1.0, 1, OUT), TypeError,
     "argument 0 of 'affine' to be tensor<?x4xf32>, found tensor<2x4xf64>"),
    ((X.bool(), 1.0, 1, OUT), TypeError, "found tensor<2x4xi1>"),
    ((torch.zeros(2, 5), 1.0, 1, OUT), ValueError, "found tensor<2x5xf32>"),
    ((torch.zeros(4), 1.0, 1, OUT), ValueError, "found tensor<4xf32>"),
    ((torch.zeros(4, 4).T[:2], 1.0, 1, OUT), ValueError, "contiguous, found other strides"),
    ((X, 1.0, 1, torch.zeros(4, 4).T), ValueError, "result 0 of 'affine' to be contiguous"),
    ((X.to("meta"), 1.0, 1, OUT), (ValueError, RuntimeError, BufferError), ""),
    (("x", 1.0, 1, OUT), TypeError, "found an object of type str"),
    ((None, 1.0, 1, OUT), TypeError, "found an object of type NoneType"),
    ((X, "one", 1, OUT), TypeError, ""),
    ((X, 1.0, 1.5, OUT), TypeError, ""),
    ((X, 1.0, 2**63, OUT), ValueError, "argument 2 of 'affine' to be a value of i64"),
])
def test_wrong_arguments_raise(affine, arguments, error, message):
    with pytest.raises(error) as caught:
        affine(*arguments)
    assert message in str(caught.value)


def test_a_result_buffer_must_be_writable(affine):
    out = numpy.zeros((2, 4), "float32")
    out.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        affine(X, 1.0, 1, out)


@pytest.mark.parametrize("element, dtype", [
    pytest.param("i1", torch.bool, marks=pytest.mark.skip(
        reason="finalize-memref-to-llvm of MLIR 22.1.8 asserts on scalar loads of i1")),
    ("i8", torch.int8), ("i8", torch.uint8), ("i16", torch.int16),
    ("i32", torch.int32), ("i64", torch.int64), ("index", torch.int64), ("f16", torch.float16),
    ("bf16", torch.bfloat16), ("f32", torch.float32), ("f64", torch.float64)])
def test_every_element_type_is_copied_exactly(moe, element, dtype):
    text = f"""func.func @copy(%x: tensor<?x3x{element}>) -> tensor<?x3x{element}> {{
      %c0 = arith.constant 0 : index
      %n = tensor.dim %x, %c0 : tensor<?x3x{element}>
      %e = tensor.empty(%n) : tensor<?x3x{element}>
      %r = linalg.copy ins(%x : tensor<?x3x{element}>) outs(%e : tensor<?x3x{element}>)
        -> tensor<?x3x{element}>
      return %r : tensor<?x3x{element}>
    }}"""
    copy = moe.Executable(moe.compile_object(text)).function("copy")
    x = (torch.arange(6).view(2, 3) % 2).to(dtype) if element == "i1" else \
        torch.arange(6).view(2, 3).to(dtype)
    out = torch.zeros_like(x)
    copy(x, out)
    assert torch.equal(out, x)


def test_rank_zero_and_narrow_scalars(moe):
    text = """func.func @f(%x: tensor<f32>, %b: i1, %i: i8) -> tensor<f32> {
      %v = tensor.extract %x[] : tensor<f32>
      %w = arith.sitofp %i : i8 to f32
      %s = arith.select %b, %v, %w : f32
      %r = tensor.from_elements %s : tensor<f32>
      return %r : tensor<f32>
    }"""
    f = moe.Executable(moe.compile_object(text)).function("f")
    out = torch.zeros(())
    f(torch.tensor(2.5), True, -3, out)
    assert out == 2.5
    f(torch.tensor(2.5), False, -3, out)
    assert out == -3
    with pytest.raises(ValueError, match="a value of i8, found 128"):
        f(torch.tensor(2.5), False, 128, out)
    with pytest.raises(ValueError, match="a value of i1, found 2"):
        f(torch.tensor(2.5), 2, 0, out)


@pytest.mark.parametrize("text, message", [
    ("func.func @f(%x: tensor<*xf32>) { return }", "expected argument 0 of public function 'f'"),
    ("func.func @f(%x: vector<4xf32>) { return }", "found 'vector<4xf32>'"),
    ("func.func @f(%x: f16) { return }", "found 'f16'"),
    ("func.func @f(%x: memref<4xf32, strided<[2]>>) { return }", "argument 0"),
    ("func.func private @f() { return }", "expected a public function to compile"),
    ("module {}", "expected a public function to compile"),
])
def test_what_cannot_be_called_is_not_compiled(moe, text, message):
    with pytest.raises(moe.MoeError) as caught:
        moe.compile_object(text)
    assert message in str(caught.value)


def test_a_pipeline_that_stops_early_is_an_error(moe):
    with pytest.raises(moe.MoeError, match="expected a module in the LLVM dialect"):
        moe.compile_object(AFFINE, "canonicalize")


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x7fELF" + bytes(100)])
def test_a_broken_object_is_an_error(moe, data):
    with pytest.raises(moe.MoeError):
        moe.Executable(data)


def test_an_unknown_function_lists_the_known_ones(moe):
    executable = moe.Executable(moe.compile_object(AFFINE))
    assert executable.functions == ["affine"]
    with pytest.raises(moe.MoeError, match="one of 'affine', found 'other'"):
        executable.function("other")


def test_a_function_keeps_its_code_alive(moe):
    function = moe.Executable(moe.compile_object(AFFINE)).function("affine")
    assert torch.equal(call(function, X + 1), X + 5)


def test_dumps_every_phase(moe, tmp_path):
    moe.compile_object(AFFINE, dump_dir=str(tmp_path))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names[0] == "00-input.mlir" and names[-2:] == ["90-optimised.ll", "91-code.s"]
    assert "linalg.generic" in (tmp_path / "00-input.mlir").read_text()
    last = [n for n in names if n.endswith(".mlir")][-1]
    assert "llvm.func" in (tmp_path / last).read_text()


def test_concurrent_compiles_and_calls(moe):
    failures = []

    def work(seed):
        try:
            function = moe.Executable(moe.compile_object(AFFINE)).function("affine")
            x = torch.full((64, 4), float(seed))
            for _ in range(50):
                assert torch.equal(call(function, x), x * 2 + 3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_thread_limit(moe):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert moe.get_num_threads() == 2
        moe.set_num_threads(5)
        assert moe.get_num_threads() == 5
        moe.set_num_threads(0)
        torch.set_num_threads(1)
        assert moe.get_num_threads() == 1
    finally:
        moe.set_num_threads(0)
        torch.set_num_threads(before)


def run_python(code):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, timeout=120)


@pytest.mark.parametrize("first, second", [("torch", "moe_mlir._moe"), ("moe_mlir._moe", "torch")])
def test_one_openmp_runtime_in_either_import_order(first, second):
    result = run_python(f"import {first}, {second}\n"
                        "maps = open('/proc/self/maps').read().split()\n"
                        "print(len({p for p in maps if '/libgomp' in p}))")
    assert result.stdout.strip() == "1", result.stderr


def test_upstream_bindings_first_are_refused():
    # A stand-in for the loaded package: only its name matters.
    result = run_python("import sys, types\n"
                        "sys.modules['mlir._mlir_libs'] = types.ModuleType('mlir._mlir_libs')\n"
                        "import moe_mlir._moe")
    assert "expected to be the only LLVM of the process" in result.stderr
    assert result.returncode == 1
