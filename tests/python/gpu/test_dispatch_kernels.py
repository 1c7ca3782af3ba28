"""dispatch as kernels, executed in the PTX simulator, bit for bit as the CPU has it."""

import pytest
import torch
from gpu_kernels import compile_function, shaped
from test_statistics_kernels import launch

import moe_mlir as m

sim = pytest.importorskip("moe_mlir.sim")


def choose(n, k, experts, dtype=torch.int64):
    """Out of range and repeated choices are among them."""
    generator = torch.Generator().manual_seed(n + 7 * k + experts)
    idx = torch.randint(-1, experts + 1, (n, k), generator=generator)
    if dtype is torch.int64 and n:
        idx[0, 0] = 2**40 + 1
    return idx.to(dtype)


def check(idx, experts, launches=None, chip="sm_90", **options):
    """Under seeds and policies of the simulator."""
    expected = m.dispatch(idx, experts, **options)
    for seed, policy in ((1, 0), (2, 0), (3, 1)):
        with m.simulate(chip=chip, seed=seed, policy=policy) as simulation:
            found = m.dispatch(idx, experts, **options)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        assert not any(report.findings for report in simulation.reports)
        if launches is not None:
            assert len(simulation.reports) == launches


@pytest.mark.parametrize("experts, k", [(1, 1), (5, 2), (8, 8), (64, 6), (129, 3), (300, 8)])
@pytest.mark.parametrize("n", [0, 1, 33, 128])
def test_one_block_places_few_assignments(n, experts, k):
    check(choose(n, k, experts), experts, launches=1)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("n, k, experts", [(256, 8, 16), (700, 6, 64), (1900, 8, 128)])
def test_blocks_count_and_place_many(n, k, experts, chip):
    check(choose(n, k, experts), experts, launches=2, chip=chip)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_blocks_take_several_tiles_where_there_are_enough(chip):
    check(choose(20000, 8, 24), 24, launches=2, chip=chip)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", [40, 600])
def test_options(n, dtype):
    idx, experts = choose(n, 4, 12, dtype), 12
    mask = torch.rand(n, generator=torch.Generator().manual_seed(n)) > 0.3
    check(idx, experts, mask=mask)
    for capacity in (0, 1, n // 5, 10**9):
        check(idx, experts, capacity=capacity)
    check(idx, experts, capacity_factor=0.75, mask=mask)
    check(idx, experts, alignment=16, capacity=n // 5)
    expert_map = torch.tensor([-1, -1, 1, 0, -1, -1, 2, -1, 5, 3, 9], dtype=torch.int32)
    check(idx, 6, expert_map=expert_map, alignment=8)
    check(idx, experts, gates=torch.rand(n, 4))


def text(n, k, experts, slots):
    ids, s = shaped("tensor", (n, k), torch.int32), shaped("tensor", (n, k), slots)
    dims = "".join(
        f"  %d{i} = tensor.dim %ids, %c{i} : {ids}\n" for i, size in enumerate((n, k)) if size is None)
    sizes = ", ".join(f"%d{i}" for i, size in enumerate((n, k)) if size is None)
    o, c = f"tensor<{experts + 1}xi32>", f"tensor<{experts}xi32>"
    return f"""
func.func @dispatch(%ids: {ids}) -> ({s}, {o}, {c}) {{
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
{dims}  %s = tensor.empty({sizes}) : {s}
  %o = tensor.empty() : {o}
  %c = tensor.empty() : {c}
  %r:3 = moe.dispatch ins(%ids : {ids}) outs(%s, %o, %c : {s}, {o}, {c}) -> {s}, {o}, {c}
  return %r#0, %r#1, %r#2 : {s}, {o}, {c}
}}"""


@pytest.mark.parametrize("n", [30, 900])
@pytest.mark.parametrize("is_static", [(False, False), (True, True), (True, False)])
def test_sizes_may_be_static_or_dynamic(n, is_static):
    k, experts = 3, 10
    ids = choose(n, k, experts, torch.int32)
    sizes = (size if known else None for size, known in zip((n, k), is_static))
    function = compile_function(text(*sizes, experts, torch.int32))
    outs = [torch.empty(size, dtype=torch.int32) for size in ((n, k), experts + 1, experts)]
    for found, expected in zip(launch(function, [ids], outs), m.dispatch(ids, experts)):
        assert torch.equal(found.long(), expected)
    if is_static == (True, True):
        assert len(function.plan.kernel_names) == 1 + (n == 900)
