"""combine and token_rows as kernels, executed in the PTX simulator, bit for bit as the CPU."""

import pytest
import torch
from gpu_kernels import compile_function, shaped
from test_statistics_kernels import launch

import moe_mlir as m
from moe_mlir.ops.token_rows import token_rows

sim = pytest.importorskip("moe_mlir.sim")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def check(call, launches=None, chip="sm_90"):
    """Under seeds and policies of the simulator."""
    expected = call()
    for seed, policy in ((1, 0), (2, 0), (3, 1)):
        with m.simulate(chip=chip, seed=seed, policy=policy) as simulation:
            found = call()
        assert torch.equal(found, expected)
        assert not any(report.findings for report in simulation.reports)
        assert launches is None or len(simulation.reports) == launches


# ---- combine --------------------------------------------------------------------


def check_combine(n, k, width, dtype=F32, slot_dtype=torch.int64, shared=False, rows=None):
    generator = torch.Generator().manual_seed(n + k + width)
    rows = n * k + 3 if rows is None else rows
    out = torch.randn(rows, width, generator=generator).to(dtype)
    gates = torch.rand(n, k, generator=generator)
    # Beside rows, some slots are none, whatever their gates.
    slots = torch.randint(-2, rows + 2, (n, k), generator=generator)
    gates[slots == -1] = float("nan")
    more = torch.randn(n, width, generator=generator).to(dtype) if shared else None
    check(lambda: m.combine(out, gates, slots.to(slot_dtype), shared=more), launches=n > 0)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("width", [1, 7, 8, 64, 96, 1064])
def test_combine_of_any_width(width, dtype):
    check_combine(5, 2, width, dtype, shared=width == 96)


@pytest.mark.parametrize("n", [0, 1, 37])
@pytest.mark.parametrize("k", [1, 6, 8, 13, 16])
def test_combine_of_any_number_of_choices(n, k):
    check_combine(n, k, 24, BF16, torch.int32)


def test_combine_without_rows():
    check_combine(4, 2, 16, rows=0)
    check_combine(4, 2, 16, rows=0, shared=True)


@pytest.mark.parametrize("chip", ["sm_80", "sm_120"])
def test_combine_on_other_chips(chip):
    out, gates = torch.randn(40, 72).bfloat16(), torch.rand(3, 4, 2)
    slots = torch.randint(40, (3, 4, 2))
    check(lambda: m.combine(out, gates, slots), chip=chip)


def combine_text(dims, types):
    """Every size dynamic; `shared` and `y` of types of their own."""
    n, k, d = dims
    out, gates, slots = (shaped("tensor", shape, dtype) for shape, dtype in (
        ((None, d), types[0]), ((*n, k), F32), ((*n, k), torch.int32)))
    shared, y = (shaped("tensor", (*n, d), dtype) for dtype in types[1:])
    sizes = [f"%d{i}" for i in range(len(n))] + (["%w"] if d is None else [])
    return f"""
func.func @combine(%out: {out}, %gates: {gates}, %slots: {slots}, %shared: {shared}) -> {y} {{
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %d0 = tensor.dim %gates, %c0 : {gates}
  %d1 = tensor.dim %gates, %c1 : {gates}
  %w = tensor.dim %out, %c1 : {out}
  %init = tensor.empty({", ".join(sizes)}) : {y}
  %y = moe.combine ins(%out, %gates, %slots : {out}, {gates}, {slots}) shared(%shared : {shared})
      outs(%init : {y}) -> {y}
  return %y : {y}
}}"""


@pytest.mark.parametrize("k", [None, 3, 11])
@pytest.mark.parametrize("width", [None, 40])
@pytest.mark.parametrize("types", [(BF16, F32, F16), (F32, BF16, BF16)])
def test_combine_of_leading_dims_dynamic_sizes_and_several_types(k, width, types):
    function = compile_function(combine_text(((None, None), k, width), types))
    assert len(function.plan.kernel_names) == 1
    k = 9 if k is None else k
    rows, gates = torch.randn(50, 40).to(types[0]), torch.rand(3, 5, k)
    slots = torch.randint(-1, 51, (3, 5, k), dtype=torch.int32)
    shared = torch.randn(3, 5, 40).to(types[1])
    (y,) = launch(function, [rows, gates, slots, shared], [torch.empty(3, 5, 40, dtype=types[2])])
    expected = m.combine(rows.float(), gates, slots, shared=shared.float())
    assert torch.equal(y, expected.to(types[2]))


# ---- token_rows -----------------------------------------------------------------


def slots_of(n, k, kept):
    """Rows of a share of the assignments; the others have none, of both kinds."""
    generator = torch.Generator().manual_seed(n + k)
    slots = torch.randperm(n * k, generator=generator).view(n, k)
    dropped = torch.rand(n, k, generator=generator) >= kept
    return torch.where(dropped, torch.where(slots % 2 == 0, -1, n * k + slots), slots)


@pytest.mark.parametrize("n, k, launches", [
    (0, 2, 1), (1, 1, 1), (33, 8, 1), (255, 8, 1), (256, 8, 2), (3000, 3, 2),
])
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_token_rows(n, k, launches, chip):
    for dtype in (torch.int32, torch.int64):
        slots = slots_of(n, k, 0.7).to(dtype)
        check(lambda slots=slots: token_rows(slots), launches, chip)


def test_token_rows_of_other_numbers_of_rows_and_dynamic_choices():
    s, r = shaped("tensor", (None, None), torch.int32), shaped("tensor", (None,), torch.int32)
    function = compile_function(f"""
func.func @rows(%slots: {s}, %init: {r}) -> {r} {{
  %rows = moe.token_rows ins(%slots : {s}) outs(%init : {r}) -> {r}
  return %rows : {r}
}}""")
    slots = slots_of(60, 4, 0.9).int()
    for count in (0, 10, 240, 9000):
        init = torch.zeros(count, dtype=torch.int32)
        (found,) = launch(function, [slots, init], [torch.empty_like(init)])
        expected = torch.zeros(count, dtype=torch.int32)
        for token, row in enumerate(slots.tolist()):
            for slot in row:
                if 0 <= slot < count:
                    expected[slot] = token
        assert torch.equal(found, expected)
