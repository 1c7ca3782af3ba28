"""Dispatch, grouped layers and their gradients; eager and compiled."""

import pytest
import torch

import moe_mlir
from moe_mlir.experts import run_experts

T, K, E, D, H = 7, 2, 4, 6, 5


def naive(x, gates, indices, w_in, w_out):
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for gate, e in zip(gates[t], indices[t].tolist()):
            if e >= 0:
                y[t] = y[t] + gate * (w_out[e] @ torch.nn.functional.gelu(w_in[e] @ x[t]))
    return y


@pytest.fixture
def problem():
    torch.manual_seed(0)
    indices = torch.stack([torch.randperm(E - 1)[:K] for _ in range(T)])  # expert 3 is idle
    indices[2] = torch.tensor([-1, 0])
    return (torch.randn(T, D), torch.rand(T, K), indices, torch.randn(E, H, D),
            torch.randn(E, D, H))


def test_run_experts_is_the_sum_over_selected_experts(problem):
    torch.testing.assert_close(run_experts(*problem), naive(*problem))


def test_gradients_of_run_experts(problem):
    x, gates, indices, w_in, w_out = (t.double() if t.is_floating_point() else t for t in problem)
    inputs = [t.requires_grad_() for t in (x, gates, w_in, w_out)]
    assert torch.autograd.gradcheck(
        lambda a, g, i, o: run_experts(a, g, indices, i, o), inputs)


def test_dispatch_puts_first_choices_first():
    indices = torch.tensor([[1, 0], [0, 1], [-1, 1]])
    slots, offsets, counts = moe_mlir.dispatch(indices, 3)
    assert slots.tolist() == [[2, 1], [0, 3], [-1, 4]]
    assert offsets.tolist() == [0, 2, 5, 5] and counts.tolist() == [2, 3, 0]
    assert torch.ops.moe.token_rows(slots).tolist() == [1, 0, 0, 1, 2, 0]


def test_dispatch_of_no_tokens():
    slots, offsets, counts = moe_mlir.dispatch(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert slots.shape == (0, 2) and offsets.tolist() == [0] * 4 and counts.tolist() == [0] * 3


@pytest.mark.parametrize("op, arguments", [
    ("token_rows", lambda: (torch.tensor([[0, 3], [1, 2]]),)),
    ("grouped_linear", lambda: (torch.randn(4, 6, requires_grad=True),
                                torch.randn(3, 5, 6, requires_grad=True),
                                torch.randn(3, 5, requires_grad=True),
                                torch.tensor([0, 2, 2, 3]))),
])
def test_opcheck(op, arguments):
    torch.library.opcheck(getattr(torch.ops.moe, op).default, arguments())


@pytest.mark.parametrize("offsets", ([0, 2, 2, 5], [0, 2, 2, 3], [1, 1, 4, 5], [0, 0, 0, 0]))
@pytest.mark.parametrize("has_bias", (False, True))
def test_rows_of_no_expert_are_zero(offsets, has_bias):
    x, w = torch.randn(5, 6), torch.randn(3, 4, 6)
    bias = torch.randn(3, 4) if has_bias else None
    expected = torch.zeros(5, 4)
    for e in range(3):
        rows = slice(offsets[e], offsets[e + 1])
        expected[rows] = x[rows] @ w[e].T + (bias[e] if has_bias else 0.0)
    # Memory that was not zero before.
    torch.full((5, 4), float("nan"))
    y = torch.ops.moe.grouped_linear(x, w, bias, torch.tensor(offsets))
    torch.testing.assert_close(y, expected)


def test_errors_name_the_mismatch():
    with pytest.raises(ValueError, match=r"expected x \[rows, in\] and w \[experts, out, in\]"):
        torch.ops.moe.grouped_linear(torch.randn(2, 3), torch.randn(2, 3, 4), None,
                                     torch.tensor([0, 1, 2]))


class Experts(torch.nn.Module):
    def __init__(self, w_in, w_out):
        super().__init__()
        self.w_in, self.w_out = torch.nn.Parameter(w_in), torch.nn.Parameter(w_out)

    def forward(self, x, gates, indices):
        return run_experts(x, gates, indices, self.w_in, self.w_out)


def test_compiled_experts_equal_eager(problem):
    x, gates, indices, w_in, w_out = problem
    model = Experts(w_in, w_out)
    compiled = moe_mlir.compile(model, (x, gates, indices))
    for n in (T, 1, 0):
        inputs = x[:n], gates[:n], indices[:n]
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
