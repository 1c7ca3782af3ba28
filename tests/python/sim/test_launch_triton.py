"""sim.compile_triton and sim.launch_triton: what they pass to a kernel, and what they refuse."""

import inspect
import re
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_mlir import sim

triton = pytest.importorskip(
    "triton", reason="Triton is not installed; requirements.txt pins it for Linux on x86-64")

import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402


@triton.jit
def _scale(x, y, n, factor, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, factor * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def _tuple(out, sources, steps):
    i = tl.arange(0, 32)
    tl.store(out + i, tl.load(sources[0] + i) + steps[0] * tl.load(sources[1] + i) + steps[1])


@triton.jit
def _types(out, a, b, c, d, e):
    tl.store(out, a.to(tl.float32))
    tl.store(out + 1, b.to(tl.float32))
    tl.store(out + 2, c.to(tl.float32))
    tl.store(out + 3, d.to(tl.float32))
    tl.store(out + 4, tl.where(e, 1.0, 0.0))


@triton.jit
def _copy(a, o, B: tl.constexpr):
    at = tl.program_id(0) * B
    o.store([at, 0], a.load([at, 0]))


@triton.jit
def _race(x, B: tl.constexpr):
    """Every program writes the sum of what all wrote: nothing orders them."""
    i = tl.arange(0, B)
    tl.store(x + i, tl.load(x + i) + tl.program_id(0))


@triton.jit
def _beyond(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 1.0)


@pytest.fixture(scope="module")
def scale():
    x = torch.ones(96)
    return sim.compile_triton(_scale, (x, x, 96, 2.0), B=64)


@pytest.fixture
def arrays():
    return torch.arange(96.0), torch.zeros(96)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_every_form_of_the_arguments(chip):
    x, one = torch.arange(96.0), 1
    kernel = sim.compile_triton(_scale, (x, x, 96, one), chip=chip, B=64, num_warps=2)
    assert kernel.src.signature["factor"] == "constexpr"  # 1 was compiled in
    forms = [lambda y: (x, y, 96), lambda y: (x, y, 96, 1), lambda y: (x, y, 96, 1, 64),
             lambda y: dict(x=x, y=y, n=96), lambda y: dict(x=x, y=y, n=96, factor=1, B=64)]
    for form in forms:
        y = torch.zeros(96)
        report = sim.launch_triton(kernel, (2,), form(y))
        assert report.ok and torch.equal(x, y)


def test_numpy_arrays(scale):
    x, y = np.arange(96, dtype=np.float32), np.zeros(96, np.float32)
    assert sim.launch_triton(scale, 2, (x, y, 96, 0.5)).ok
    assert np.array_equal(y, x / 2)
    assert sim.compile_triton(_scale, (x, y, 96, 2.0), B=64).hash == scale.hash


def test_a_kernel_of_triton_compile():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "factor": "fp32", "B": "constexpr"}
    kernel = triton.compile(ASTSource(_scale, signature, {"B": 32}),
                            target=GPUTarget("cuda", 80, 32), options={"num_warps": 8})
    x, y = torch.arange(41.0)[1:], torch.zeros(40)  # of no alignment that a JIT would know
    assert sim.launch_triton(kernel, (2,), (x, y, 40, 3.0)).ok
    assert torch.equal(y, 3 * x)


def test_tuples_are_flattened():
    a, b, out = torch.ones(32), torch.ones(32), torch.zeros(32)
    args = (out, (a, b), (3, 4.0))
    kernel = sim.compile_triton(_tuple, args)
    assert sim.launch_triton(kernel, 1, args).ok and out.eq(8).all()
    with pytest.raises(TypeError, match=r"expected 'sources' to be a tuple of 2, found \(tensor"):
        sim.launch_triton(kernel, 1, (out, (a,), (3, 4.0)))
    with pytest.raises(TypeError, match=r"expected 'sources\[1\]' to have elements of float32"):
        sim.launch_triton(kernel, 1, (out, (a, b.half()), (3, 4.0)))


def test_every_type_of_a_number():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"out": "*fp32", "a": "bf16", "b": "fp16", "c": "i64", "d": "u8", "e": "i1"}
    kernel = triton.compile(ASTSource(_types, types), target=GPUTarget("cuda", 80, 32))
    out = torch.zeros(5)
    assert sim.launch_triton(kernel, 1, (out, 1.004, -2.5, -2**40, 200, True)).ok
    assert out.tolist() == [torch.tensor(1.004).bfloat16().item(), -2.5, -2.0**40, 200, 1]
    with pytest.raises(ValueError, match="expected 'd' to fit u8, found 256"):
        sim.launch_triton(kernel, 1, (out, 1.0, 1.0, 1, 256, True))
    with pytest.raises(TypeError, match=r"expected 'c' to be an integer \(i64\), found float"):
        sim.launch_triton(kernel, 1, (out, 1.0, 1.0, 1.5, 1, True))
    with pytest.raises(TypeError, match=r"expected 'a' to be a number \(bf16\), found str"):
        sim.launch_triton(kernel, 1, (out, "1", 1.0, 1, 1, True))


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_descriptors_with_their_shape_and_strides(chip, padding):
    """Of a view of some columns, whose last tile reaches over the edge."""
    a, o = torch.randn(40, 64).half(), torch.zeros(64, 32).half()
    args = (TensorDescriptor(a, [40, 24], [64, 1], [32, 32], padding),
            TensorDescriptor.from_tensor(o, [32, 32]))
    kernel = sim.compile_triton(_copy, args, chip=chip, B=32)
    assert bool(kernel.metadata.tensordesc_meta) == (chip == "sm_90")
    assert sim.launch_triton(kernel, 2, args).ok
    want = torch.full((64, 32), float("nan") if padding == "nan" else 0.0).half()
    want[:40, :24] = a[:, :24]
    torch.testing.assert_close(o, want, equal_nan=True, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"expected 'o' to have blocks of \[32, 32\]"):
        sim.launch_triton(kernel, 2, (args[0], TensorDescriptor.from_tensor(o, [32, 16])))
    with pytest.raises(TypeError, match="expected 'o' to be a triton.tools.tensor_descriptor"):
        sim.launch_triton(kernel, 2, (args[0], o))
    with pytest.raises(TypeError, match="expected 'o.base' to have elements of float16"):
        sim.launch_triton(kernel, 2, (args[0], TensorDescriptor.from_tensor(o.float(), [32, 32])))


@pytest.mark.parametrize("change, error, message", [
    (lambda x, y: (x, y), ValueError, "expected 4 arguments for kernel _scale (x, y, n, factor), "
     "or all 5 with those that were compiled in, found 2"),
    (lambda x, y: dict(x=x, n=96, factor=2.0), ValueError,
     "expected a value for argument 'y' of kernel _scale, found none"),
    (lambda x, y: dict(z=x), ValueError,
     "expected arguments out of ['x', 'y', 'n', 'factor', 'B'], found ['z']"),
    (lambda x, y: (x, y, 96, 2.0, 128), ValueError,
     "expected 'B' to be 64, which was compiled into the kernel, found 128"),
    (lambda x, y: (x.half(), y, 96, 2.0), TypeError,
     "expected 'x' to have elements of float32 as the kernel was compiled for (*fp32), found float16"),
    (lambda x, y: (x.reshape(8, 12).T, y, 96, 2.0), ValueError,
     "expected 'x' to be contiguous, found strides (1, 12)"),
    (lambda x, y: (x[1:], y, 96, 2.0), ValueError,
     "expected 'x' to start at a multiple of 16 bytes, which the kernel was compiled for, found 4"),
    (lambda x, y: (x, 7, 96, 2.0), TypeError, "expected 'y' to be an array or a tensor (*fp32)"),
    (lambda x, y: (x, y, 95, 2.0), ValueError,
     "expected 'n' to be a multiple of 16, which the kernel was compiled for, found 95"),
    (lambda x, y: (x, y, 2**31, 2.0), ValueError, "expected 'n' to fit i32, found 2147483648"),
    (lambda x, y: (x.to("meta"), y, 96, 2.0), ValueError, "expected 'x' to be on the cpu"),
])
def test_errors_name_the_argument(scale, arrays, change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        sim.launch_triton(scale, 2, change(*arrays))
    assert arrays[1].eq(0).all()


def test_what_is_no_compiled_kernel(scale):
    with pytest.raises(TypeError, match="found JITFunction: pass it to compile_triton first"):
        sim.launch_triton(_scale, 1, ())
    with pytest.raises(ValueError, match="expected a kernel compiled for a CUDA target, found .*hip"):
        metadata = SimpleNamespace(target=SimpleNamespace(backend="hip"))
        sim.launch_triton(SimpleNamespace(asm={}, metadata=metadata), 1, ())
    with pytest.raises(TypeError, match="expected a @triton.jit function, found Autotuner: pass"):
        tuned = triton.runtime.Autotuner.__new__(triton.runtime.Autotuner)
        tuned.fn = _scale
        sim.compile_triton(tuned, ())
    for chip in ("gfx942", "sm_91", "sm_8", "90"):
        with pytest.raises(ValueError, match=f"expected a chip among .*sm_90, .*found '{chip}'"):
            sim.compile_triton(_scale, (), chip=chip)


@pytest.mark.parametrize("chip", ["sm_60", "sm_62", "sm_72", "sm_87", "sm_103", "sm_110", "sm_121"])
def test_chips_that_the_compiler_has_no_row_for(arrays, chip):
    kernel = sim.compile_triton(_scale, (*arrays, 96, 2.0), chip=chip, B=64)
    assert chip in kernel.asm["ptx"]


def test_compilation_leaves_the_driver_alone():
    from triton.runtime import driver

    before = driver._active
    with pytest.raises(Exception, match="missing"):
        sim.compile_triton(_scale, ())
    assert driver._active is before


def test_findings_name_the_line_and_the_argument():
    x = torch.zeros(64)
    kernel = sim.compile_triton(_race, (x,), B=64)
    report = sim.launch_triton(kernel, (2,), (x,))
    lines, first = inspect.getsourcelines(_race.fn)
    store = first + next(i for i, line in enumerate(lines) if "tl.store" in line)
    assert "race" in {f.kind for f in report.findings}
    assert f"test_launch_triton.py:{store}" in {f.source.split("/")[-1] for f in report.findings}
    short = torch.zeros(48)
    kernel = sim.compile_triton(_beyond, (short, 48), B=64)
    (finding,) = sim.launch_triton(kernel, 1, (short, 48)).findings
    assert finding.kind == "bounds" and "x (192 bytes)" in finding.message


def test_the_example_of_the_documentation(tmp_path):
    """In a file: Triton reads the source of its kernels."""
    example = re.findall(r"^ *(?:>>>|\.\.\.) ?(.*)$", sim.launch_triton.__doc__, re.MULTILINE)
    assert any("launch_triton" in line for line in example)
    path = tmp_path / "example.py"
    path.write_text(textwrap.dedent("\n".join(example)))
    exec(compile(path.read_text(), path, "exec"), {"__name__": "example"})
