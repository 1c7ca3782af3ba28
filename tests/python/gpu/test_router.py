"""Projection and selection as one kernel, executed in the PTX simulator."""

import math

import numpy as np
import pytest
import torch
from gpu_kernels import compile_function, compile_kernels
from reference import gates_row, order

from moe_mlir_bench.gpu_check.modules import router_text

sim = pytest.importorskip("moe_mlir.sim")


def run(n, e, d, k, *, dtype=torch.float32, bias=False, seed=0, batch=(), chip="sm_90"):
    """Returns the counters of the last launch."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(*batch, n, d, generator=generator).to(dtype)
    w = (torch.randn(e, d, generator=generator) / math.sqrt(d)).to(dtype)
    inputs, shapes = [h, w], [(*batch, None, d), (e, d)]
    if bias:
        inputs.append(torch.randn(e, generator=generator).to(dtype))
        shapes.append((e,))
    (kernel,) = compile_kernels(router_text(e, d, k, dtype=dtype, bias=bias, batch=batch), chip)
    z = h.double() @ w.double().T
    if bias:
        z = z + inputs[2].double()
    shapes += [(*batch, None, k)] * 2
    first = None
    for options in ({"seed": 1}, {"seed": 2, "policy": 1}):
        gates = torch.full((*batch, n, k), 77.0)
        indices = torch.full((*batch, n, k), 77, dtype=torch.int32)
        report = kernel.run([*inputs, gates, indices], shapes, **options)
        assert report is None or not report.findings
        check(z.reshape(-1, e).numpy(), gates.double().reshape(-1, k).numpy(),
              indices.long().reshape(-1, k).numpy(), d)
        assert first is None or torch.equal(first, gates)
        first = gates
    return report and report.counters


def check(z, gates, indices, d):
    if not z.size:
        return
    largest = np.abs(z).max()
    atol = 1e-6 + (8 + math.sqrt(d)) * 2.0**-24 * largest
    k = gates.shape[1]
    for x, gate, index in zip(z, gates, indices):
        assert len(set(index)) == k
        assert ((0 <= index) & (index < len(x))).all()
        chosen = x[index]
        assert (chosen >= x[order(x)[k - 1]] - atol).all()
        assert (chosen[:-1] >= chosen[1:] - atol).all()
        form = {"score": "softmax", "renorm": True}
        # A gate is 1-Lipschitz in each of its logits' errors, and there are two
        # of them: its own and the normaliser's.
        np.testing.assert_allclose(
            gate, gates_row(x, x, index, form), rtol=0, atol=2 * atol
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routes(dtype):
    run(21, 16, 96, 2, dtype=dtype)


@pytest.mark.parametrize("n", [0, 1, 17])
def test_any_number_of_tokens(n):
    run(n, 8, 40, 2, seed=n)


@pytest.mark.parametrize("e, d, k", [(1, 1, 1), (7, 33, 3), (130, 64, 8), (5, 31, 5)])
def test_sizes_that_divide_nothing(e, d, k):
    run(6, e, d, k, seed=e)


def test_bias():
    run(9, 12, 50, 3, bias=True, dtype=torch.bfloat16)


def test_so_many_experts_that_tiles_shrink():
    run(5, 2048, 32, 4)


# ---- on tensor cores -----------------------------------------------------------


def uses_tensor_cores(counters):
    return any(name.startswith("mma.sync") for name in counters["instructions"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("e, d, k", [
    (8, 64, 2), (9, 72, 3), (60, 200, 4), (64, 352, 8), (130, 64, 8), (256, 136, 8), (513, 64, 10),
])
def test_tensor_cores_multiply_rows_of_whole_units(dtype, e, d, k):
    assert uses_tensor_cores(run(37, e, d, k, dtype=dtype, seed=e, bias=e % 2 == 1))


def test_rows_of_other_widths_are_multiplied_by_the_float_units():
    assert not uses_tensor_cores(run(37, 16, 100, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("n", [0, 1, 16, 17, 63, 64, 129])
def test_any_number_of_tokens_on_tensor_cores(n):
    run(n, 16, 64, 2, dtype=torch.bfloat16, seed=n)


@pytest.mark.parametrize("batch, n", [((1,), 70), ((3,), 21)])
def test_batches_run_in_the_same_kernel(batch, n):
    assert uses_tensor_cores(run(n, 16, 64, 2, dtype=torch.bfloat16, batch=batch))


@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_120"])
def test_many_experts_on_chips_with_little_shared_memory(chip):
    assert uses_tensor_cores(run(20, 300, 96, 8, dtype=torch.bfloat16, chip=chip))


# ---- few tokens ----------------------------------------------------------------


def route(h, w, k, chip="sm_90", bias=None, **options):
    """Gates, indices, and the names of the kernels that ran."""
    n, (e, d) = len(h), w.shape
    text = router_text(e, d, k, dtype=h.dtype, bias=bias is not None)
    gates = torch.full((n, k), 77.0)
    indices = torch.full((n, k), 77, dtype=torch.int32)
    inputs = [h.contiguous(), w] if bias is None else [h.contiguous(), w, bias]
    reports = compile_function(text, chip)(*inputs, gates, indices, **options)
    assert not any(report.findings for report in reports)
    return gates, indices, [report.kernel for report in reports]


def wide_operands(n, e, d, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(e, d, generator=generator) / math.sqrt(d)
    return torch.randn(n, d, generator=generator).to(dtype), w.to(dtype)


CUT = ["route_kernel", "route_kernel_1"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_tokens_have_the_bits_of_many(dtype):
    h, w = wide_operands(300, 64, 1024, dtype)
    bias = torch.randn(64).to(dtype)
    gates, indices, kernels = route(h, w, 6, bias=bias)
    assert kernels == ["route_kernel_2"]
    for n in (0, 1, 2, 17, 32, 33, 64, 256, 257):
        for options in ({"seed": 1}, {"seed": 2, "policy": 1}):
            some_gates, some_indices, kernels = route(h[:n], w, 6, bias=bias, **options)
            assert kernels == ([] if n == 0 else CUT if n <= 256 else ["route_kernel_2"])
            assert torch.equal(some_gates, gates[:n])
            assert torch.equal(some_indices, indices[:n])


@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_90a", "sm_120"])
def test_few_tokens_have_the_same_bits_on_every_chip(chip):
    h, w = wide_operands(35, 96, 1088, torch.bfloat16)
    expected, found = route(h, w, 6), route(h, w, 6, chip=chip)
    assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
    assert found[2] == CUT


@pytest.mark.parametrize("e, d, k", [(32, 1024, 2), (160, 1280, 6), (64, 2880, 4), (256, 2048, 8)])
def test_few_tokens_choose_the_experts_of_the_exact_logits(e, d, k):
    h, w = wide_operands(5, e, d, torch.bfloat16, seed=e)
    gates, indices, kernels = route(h, w, k)
    assert kernels == CUT
    z = h.double() @ w.double().T
    check(z.numpy(), gates.double().numpy(), indices.long().numpy(), d)
    assert torch.equal(indices.long(), z.topk(k).indices)


@pytest.mark.parametrize("n", [1, 20])
def test_a_known_number_of_few_tokens_has_no_kernel_for_many(n):
    h, w = wide_operands(n, 32, 1024, torch.bfloat16)
    text = router_text(32, 1024, 4, dtype=h.dtype).replace("?", str(n)).replace(
        "tensor.empty(%n)", "tensor.empty()")
    function = compile_function(text)
    gates, indices = torch.full((n, 4), 77.0), torch.full((n, 4), 77, dtype=torch.int32)
    reports = function(h, w, gates, indices)
    assert [report.kernel for report in reports] == list(function.plan.kernel_names) == CUT
    expected = route(h, w, 4)
    assert torch.equal(gates, expected[0]) and torch.equal(indices, expected[1])


@pytest.mark.parametrize("e, d", [(32, 960), (48, 1024)])
def test_tokens_that_are_not_cut_are_work_of_one_block(e, d):
    h, w = wide_operands(3, e, d, torch.bfloat16)
    assert route(h, w, 2)[2] == ["route_kernel"]


@pytest.mark.parametrize("e, groups", [(256, 8), (128, 8), (256, 64), (384, 4)])
def test_groups_of_few_tokens_are_those_of_many(e, groups):
    """Where a warp has a token alone, its lanes share the groups. Half of the experts are equal
    to others, and so are half of the groups: of these the lower ones count."""
    h, w = wide_operands(258, e, 1024, torch.bfloat16)
    w[e // 2:] = w[:e // 2]
    w[:e // groups] = w[e // groups:2 * (e // groups)]
    h[1], h[2, 0] = 0.0, math.nan
    text = router_text(e, 1024, 4, dtype=h.dtype).replace(
        "%w: ", f"%select: tensor<{e}xf32>, %w: ").replace(
        "outs(%g0", f"bias(%select : tensor<{e}xf32>) outs(%g0").replace(
        "%i0 : tensor<?x4xf32>, tensor<?x4xi32>)",
        "%i0 : tensor<?x4xf32>, tensor<?x4xi32>) {score = #moe.score_function<sigmoid>, "
        f"n_group = {groups} : i64, topk_group = {groups // 2} : i64, eps = 1.0e-20 : f64}}")
    bias = torch.zeros(e)
    found = []
    for n in (258, 5):
        gates, indices = torch.full((n, 4), 77.0), torch.full((n, 4), 77, dtype=torch.int32)
        reports = compile_function(text)(h[:n].contiguous(), bias, w, gates, indices)
        assert [report.kernel for report in reports] == (CUT if n == 5 else ["route_kernel_2"])
        found.append((gates.view(torch.int32)[:5], indices[:5]))
    assert all(torch.equal(*pair) for pair in zip(*found))
