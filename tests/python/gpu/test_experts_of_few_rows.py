"""Layers of experts on a GPU: the kernel that reads each weight once, and torch's grouped product."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_mlir.experts.run import run_experts
from moe_mlir.ops import _expert_runs as expert_runs
from moe_mlir.ops._expert_activation import ExpertActivation
from moe_mlir.ops.grouped_linear import _of_torch, grouped_linear
from moe_mlir.ops.run_experts import _layers_by_groups, apply_gates, places
from moe_mlir.sim.simulation import simulate

BF16, F16 = torch.bfloat16, torch.float16
SWIGLU = ExpertActivation("silu", gate="concatenated")
GPT_OSS = ExpertActivation("silu", alpha=1.702, gate="interleaved", limit=7.0, up_offset=1.0)
NONE = ExpertActivation()
# What a result of 16 bits may be off by, against 1 + its magnitude.
TOLERANCE = {BF16: 2**-8, F16: 2**-11}


def operands(lengths, width, features, dtype, rest=0, offsets_dtype=torch.int32):
    """x, w, bias, offsets, rows; the last `rest` rows are of no expert."""
    experts, count = len(lengths), sum(lengths) + rest
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=offsets_dtype)
    tokens = max(1, count // 2)
    return (torch.randn(tokens, width).to(dtype),
            (width**-0.5 * torch.randn(experts, features, width)).to(dtype),
            torch.randn(experts, features).to(dtype), offsets,
            torch.randint(tokens, (count,), dtype=offsets_dtype))


def expected(x, w, bias, offsets, rows, activation):
    x = (x if rows is None else x[rows.long()]).double()
    y = torch.zeros(len(x), activation.width(w.shape[1]), dtype=torch.float64)
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
        z = x[begin:end] @ w[e].double().mT + (0 if bias is None else bias[e].double())
        y[begin:end] = activation(z)
    return y


@pytest.mark.parametrize("lengths, width, features, activation, dtype, rest", [
    ([1, 0, 2, 1], 64, 16, NONE, BF16, 0), ([8, 0, 33, 70], 128, 48, NONE, BF16, 0),
    ([1] * 8, 192, 40, SWIGLU, BF16, 0), ([3, 0, 0, 1, 9, 40, 0, 2], 576, 32, SWIGLU, BF16, 5),
    ([2, 2, 2], 1024, 24, GPT_OSS, F16, 0), ([1] * 70, 64, 18, ExpertActivation("gelu"), BF16, 0),
    ([0, 0], 64, 16, SWIGLU, BF16, 3), ([1], 2048, 2, ExpertActivation("relu2"), F16, 0),
])
@pytest.mark.parametrize("chip", ["sm_80", "sm_90a"])
def test_values(lengths, width, features, activation, dtype, rest, chip):
    for has_bias, gathers, offsets_dtype in ((True, True, torch.int32), (False, False, torch.int64)):
        x, w, bias, offsets, rows = operands(lengths, width, features, dtype, rest, offsets_dtype)
        if not gathers:
            x, rows = x[rows.long()], None
        bias = bias if has_bias else None
        with simulate(chip=chip):
            y = grouped_linear(x, w, bias, offsets, rows, activation=activation)
        want = expected(x, w, bias, offsets, rows, activation)
        if rest:
            assert not y[-rest:].any()
        assert ((y.double() - want).abs() <= TOLERANCE[dtype] * (1 + want.abs())).all()


def test_rows_that_x_does_not_have_are_zeros():
    x, w, _, offsets, rows = operands([3, 2], 64, 16, BF16)
    rows[1], rows[4] = -1, 1000
    with simulate(chip="sm_90a"):
        y = grouped_linear(x, w, None, offsets, rows)
        of_none = grouped_linear(x[:0], w, None, offsets, rows)
    assert not y[[1, 4]].any() and y[[0, 2, 3]].any(dim=1).all()
    assert not of_none.any()


@pytest.mark.parametrize("offsets", [[0, 9, 9], [-4, 2, 5], [2, 3, 4], [7, 900, 1000]])
def test_offsets_out_of_bounds_leave_no_buffer(offsets):
    """The simulator checks each address; rows of no expert are zeros where the offsets ascend."""
    x, w, _, _, rows = operands([3, 2], 64, 16, BF16)
    with simulate(chip="sm_90a"):
        grouped_linear(x, w, None, torch.tensor(offsets), rows)


def test_a_row_has_the_same_bits_among_others():
    x, w, bias, offsets, _ = operands([40, 40], 320, 64, BF16)
    x = torch.randn(80, 320).to(BF16)
    with simulate(chip="sm_90a"):
        y = grouped_linear(x, w, bias, offsets, activation=SWIGLU)
        for row, expert in ((0, 0), (39, 0), (40, 1), (75, 1)):
            alone = torch.tensor([0, 1, 1] if expert == 0 else [0, 0, 1])
            one = grouped_linear(x[row:row + 1], w, bias, alone, activation=SWIGLU)
            # 40 rows an expert are multiplied by another kernel.
            torch.testing.assert_close(one[0], y[row], rtol=2**-7, atol=2**-8)
            few = torch.tensor([0, 3, 3] if expert == 0 else [0, 0, 3])
            rows = torch.tensor([5, row, 7])
            among = grouped_linear(x, w, bias, few, rows, activation=SWIGLU)
            assert torch.equal(among[1], one[0])


def test_a_layer_of_few_tokens_is_five_launches():
    x, w_in, w_out = (torch.randn(*shape).to(BF16) for shape in ((1, 128), (8, 128, 128), (8, 128, 64)))
    with simulate(chip="sm_90a") as simulation:
        run_experts(x, torch.rand(1, 2), torch.tensor([[3, 5]]), w_in, w_out, activation=SWIGLU)
    assert len(simulation.reports) == 5


# ---------------------------------------------------------------- torch's product


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_groups_by_torch(transposed, has_bias):
    x, w, bias, offsets, rows = operands([3, 0, 5, 1], 64, 16, BF16, rest=2)
    x, bias = x[rows.long()], bias if has_bias else None
    given = w.mT.contiguous() if transposed else w
    y = expert_runs.clear_rows_of_none(
        expert_runs.multiply_groups(x, given, bias, offsets, transposed), offsets)
    want = expected(x, w, bias, offsets, None, NONE)
    assert not y[-2:].any()
    # The sum is rounded before the bias is added.
    assert ((y.double() - want).abs() <= 2**-7 * (1 + want.abs())).all()


def test_offsets_that_torch_would_trust():
    offsets = torch.tensor([-3, 4, 2, 900])
    assert expert_runs.legal(offsets, 9).tolist() == [0, 4, 4, 9]
    dw = expert_runs.multiply_columns(torch.ones(9, 8).to(BF16), torch.ones(9, 8).to(BF16), offsets)
    assert dw[:, 0, 0].tolist() == [4, 0, 5]


def test_columns_by_torch():
    x, _, _, offsets, rows = operands([3, 0, 5, 1], 64, 16, BF16, rest=2)
    x, dy = x[rows.long()], torch.randn(11, 24).to(BF16)
    dw = expert_runs.multiply_columns(dy, x, offsets)
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets[1:].tolist())):
        want = dy[begin:end].double().mT @ x[begin:end].double()
        torch.testing.assert_close(dw[e].double(), want, rtol=2**-7, atol=2**-6)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_nothing_waits_for_a_gpu():
    """Fake tensors refuse whatever asks for a value."""
    with FakeTensorMode():
        x, w, bias = (torch.empty(*shape, dtype=BF16, device="cuda:0")
                      for shape in ((500, 64), (4, 128, 64), (4, 128)))
        offsets = torch.empty(5, dtype=torch.int64, device="cuda:0")
        rows = torch.empty(900, dtype=torch.int64, device="cuda:0")
        assert expert_runs.are_grouped(x, w)
        y = _of_torch(x, w, bias, offsets, rows, False, SWIGLU)
        assert y.shape == (900, 64) and y.is_cuda
        assert expert_runs.multiply_columns(y, x.index_select(0, rows), offsets).shape == (4, 64, 64)
        assert expert_runs.sum_runs(y.float(), offsets).shape == (4, 64)
        assert expert_runs.add_rows(y, rows, 500).shape == (500, 64)


def test_a_layer_by_groups():
    x, indices = torch.randn(40, 64).to(BF16), torch.rand(40, 4).topk(2).indices
    indices[::3, 1] = -1
    gates = torch.rand(40, 2)
    w_in, w_out = torch.randn(4, 64, 64).to(BF16) / 8, torch.randn(4, 64, 32).to(BF16) / 6
    slots, offsets, tokens = places(indices, 4)
    (outputs,) = _layers_by_groups(x, w_in, None, w_out, None, offsets, tokens,
                                         (False, False), SWIGLU)
    y = apply_gates(outputs, gates, slots)
    want = run_experts(x, gates, indices, w_in, w_out, activation=SWIGLU)
    torch.testing.assert_close(y, want, rtol=2**-5, atol=2**-6)


@pytest.mark.parametrize("rows, dtype, transposed, takes", [
    (64, BF16, False, True), (65, BF16, False, False), (8, torch.float32, False, False),
    (8, F16, False, True), (8, BF16, True, False),
])
def test_which_rows_are_few(rows, dtype, transposed, takes):
    with FakeTensorMode():
        w = torch.empty(4, 32, 64, dtype=dtype, device="cuda:0")
        assert expert_runs.has_gpu_kernel(rows, w, transposed=transposed) == takes
        assert not expert_runs.has_gpu_kernel(8, w.narrow(2, 0, 40), transposed=False)


@pytest.mark.parametrize("capability, dtype, features, takes", [
    ((9, 0), F16, 64, True), ((8, 0), F16, 64, False), ((10, 0), F16, 64, False),
    ((9, 0), F16, 60, False), ((9, 0), torch.float32, 64, False), ((9, 0), BF16, 64, False),
])
def test_which_rows_warpgroups_take(monkeypatch, capability, dtype, features, takes):
    """Many rows, or weights [experts, in, out]; those of bf16 are torch's grouped product's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        w = torch.empty(4, 32, features, dtype=dtype, device="cuda:0")
        assert expert_runs.has_gpu_kernel(65, w, transposed=False) == takes
        assert expert_runs.has_gpu_kernel(8, w, transposed=True) == takes


def test_sums_of_runs():
    rows, offsets = torch.randn(9, 4), torch.tensor([0, 2, 2, 7])
    sums = expert_runs.sum_runs(rows, offsets)
    torch.testing.assert_close(sums, torch.stack([rows[:2].sum(0), torch.zeros(4), rows[2:7].sum(0)]))
