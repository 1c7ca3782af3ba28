"""A whole layer of experts in one op, and the products of runs of rows that it is made of."""

import dataclasses

import pytest
import torch
from expert_problems import FORMS, SWIGLU, E, K, call, judge, problem, rounded, wide

from moe_mlir.experts import ExpertActivation, run_experts
from moe_mlir.ops.grouped_linear import grouped_linear
from moe_mlir.ops.grouped_outer import grouped_outer

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_near(found, expected, dtype):
    scale = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1.0
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0,
                               atol=TOLERANCE[dtype])


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_forward_and_backward(name):
    act, transposed = FORMS[name], name in ("relu2", "gpt-oss")
    values = rounded(problem(33, 7, act, transposed=transposed), torch.float32)
    with torch.no_grad():
        assert_near(call(values, act, transposed), call(wide(values), act, transposed, judge),
                    torch.float32)
    exact = [x.requires_grad_() if x.is_floating_point() else x for x in wide(values)]
    leaves = [x for x in exact if x.requires_grad]
    dy = torch.randn(9, 33, dtype=torch.float64)
    expected = torch.autograd.grad(call(exact, act, transposed, judge), leaves, dy)
    for whole in (False, True):
        ours = [x.detach().requires_grad_() if x.is_floating_point() else x for x in values]
        x, gates, indices, w_in, w_out, b_in, b_out = ours
        y = torch.ops.moe.run_experts(
            x, gates, indices, w_in, b_in, w_out, b_out, transposed, *dataclasses.astuple(act),
        ) if whole else call(ours, act, transposed)  # fmt: skip
        found = torch.autograd.grad(y, [x for x in ours if x.requires_grad], dy.float())
        for a, b in zip(found, expected, strict=True):
            assert_near(a, b, torch.float32)


@pytest.mark.parametrize("name", FORMS)
def test_gradients_in_float64(name):
    act = FORMS[name]
    x, gates, indices, w_in, w_out, b_in, b_out = problem(3, 2, act, tokens=4)
    leaves = [x.requires_grad_() for x in (x, gates, w_in, b_in, w_out, b_out)]

    def layer(x, gates, w_in, b_in, w_out, b_out):
        return torch.ops.moe.run_experts(x, gates, indices, w_in, b_in, w_out, b_out, False,
                                         *dataclasses.astuple(act))
    assert torch.autograd.gradcheck(layer, leaves)


@pytest.mark.parametrize("width", (1, 7, 64))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_types_and_widths(width, dtype):
    values = rounded(problem(width, 24 if width == 64 else 3, bias=width != 7), dtype)
    expected = call(wide(values), SWIGLU, False, judge)
    assert_near(call(values, SWIGLU), expected, dtype)


@pytest.mark.parametrize("tokens, k, chosen", [(0, K, None), (9, K, 2), (4, E, "all"), (3, K, -1)])
def test_loads(tokens, k, chosen):
    values = rounded(problem(33, 7, tokens=tokens, k=k), torch.float32)
    if chosen == "all":
        values[2] = torch.arange(E).repeat(tokens, 1)
    elif chosen is not None:
        values[2] = torch.full((tokens, k), chosen)
    assert_near(call(values, SWIGLU), call(wide(values), SWIGLU, False, judge), torch.float32)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_row_depends_on_itself_alone(dtype):
    values = rounded(problem(33, 7, tokens=64), dtype)
    whole = call(values, SWIGLU)
    x, gates, indices, *weights = values
    for n in (0, 1, 17, 63):
        row = slice(n, n + 1)
        assert torch.equal(call([x[row], gates[row], indices[row], *weights], SWIGLU), whole[row])
    order = torch.randperm(64)
    assert torch.equal(call([x[order], gates[order], indices[order], *weights], SWIGLU), whole[order])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gradient_that_is_asked_for_changes_nothing(dtype):
    values = rounded(problem(33, 7, tokens=20), dtype)
    with torch.no_grad():
        expected = call(values, SWIGLU)
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in values]
    assert torch.equal(call(leaves, SWIGLU), expected)


def test_threads_change_nothing():
    values = rounded(problem(33, 7, tokens=300), torch.float32)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(call(values, SWIGLU))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_strides_change_nothing():
    values = rounded(problem(33, 7), torch.float32)
    expected = call(values, SWIGLU)
    x, gates, indices, w_in, w_out, *biases = values
    spaced = torch.stack([x, x], dim=-1)[..., 0]
    behind = torch.cat([x.new_zeros(1), w_out.flatten()])[1:].view_as(w_out)
    assert not spaced.is_contiguous() and behind.storage_offset() == 1
    found = call([spaced, gates.T.contiguous().T, indices.T.contiguous().T, w_in, behind, *biases],
                 SWIGLU)
    assert torch.equal(found, expected)
    # A weight whose matrices lie transposed is read as it lies.
    y = call([x, gates, indices, w_in.mT.contiguous().mT, w_out, *biases], SWIGLU)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_leading_dims_and_known_functions():
    x, gates, indices, w_in, w_out, *_ = rounded(problem(33, 7, FORMS["gelu"], tokens=8),
                                                 torch.float32)
    flat = run_experts(x, gates, indices, w_in, w_out)
    for function in (torch.nn.functional.gelu, torch.nn.GELU(), FORMS["gelu"]):
        y = run_experts(x.view(2, 4, -1), gates.view(2, 4, -1), indices.view(2, 4, -1), w_in, w_out,
                        activation=function)
        assert torch.equal(y.view_as(flat), flat)
    # One that is not known runs between the layers.
    y = run_experts(x, gates, indices, w_in, w_out, activation=lambda z: torch.nn.functional.gelu(z))
    torch.testing.assert_close(y, flat, rtol=1e-5, atol=1e-6)


def test_rows_are_gathered_and_gradients_added_up():
    x, w = torch.randn(4, 6), torch.randn(3, 5, 6)
    offsets, rows = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 0, 1, 3, 2])
    assert torch.equal(grouped_linear(x, w, None, offsets, rows),
                       grouped_linear(x[rows], w, None, offsets))
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    grouped_linear(found, w, None, offsets, rows).square().sum().backward()
    grouped_linear(expected[rows], w, None, offsets).square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    dy = torch.randn(6, 5)
    assert torch.equal(grouped_outer(dy, x, offsets, rows), grouped_outer(dy, x[rows], offsets))


def test_opcheck():
    x, gates, indices, w_in, w_out, b_in, b_out = rounded(problem(3, 2), torch.float32)
    leaves = [t.requires_grad_() for t in (x, gates, w_in, w_out, b_in, b_out)]
    assert leaves
    torch.library.opcheck(torch.ops.moe.run_experts.default,
                          (x, gates, indices, w_in, b_in, w_out, b_out, False,
                           *dataclasses.astuple(SWIGLU)))


@pytest.mark.parametrize("options, message", [
    (dict(activation="tanh"), "expected 'activation' to be one of 'none', 'relu'"),
    (dict(gate="both"), "expected 'gate' to be one of 'none', 'concatenated'"),
    (dict(limit=1.0), "expected 'bound', 'limit', 'up_limit' and 'up_offset' only with a 'gate'"),
    (dict(gate="concatenated", limit=-1.0), "expected 'limit' to be positive and finite, found -1"),
    (dict(activation="gelu", alpha=2.0), "expected 'alpha' and bound 'softcap' only with"),
    (dict(gate="concatenated", bound="clamp_activated"), "expected a 'limit' with bound"),
])
def test_errors_of_activations(options, message):
    values = problem(4, 2)
    with pytest.raises(ValueError, match=message):
        call(rounded(values, torch.float32), ExpertActivation(**options))


def test_errors_name_the_mismatch():
    values = rounded(problem(4, 2), torch.float32)
    with pytest.raises(ValueError, match="expected 'w_in' to take the 3 features of 'h'"):
        call([values[0][:, :3], *values[1:]], SWIGLU)
    with pytest.raises(ValueError, match="expected 'w_out' of 5 experts to take 4 features"):
        call(values, ExpertActivation("silu"))
    with pytest.raises(TypeError, match="expected 'w_out' to have the dtype of 'h'"):
        call([*values[:4], values[4].double(), *values[5:]], SWIGLU)
    with pytest.raises(ValueError, match="expected an even number of features with a 'gate'"):
        call([*values[:3], values[3][:, :3], values[4], None, None], SWIGLU)
