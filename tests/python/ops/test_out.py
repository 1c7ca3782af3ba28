"""`out=`: results in tensors of the caller, with the bits of a call without it."""

import pytest
import torch
from op_judge import random

import moe_mlir
from moe_mlir.experts import run_experts
from moe_mlir.ops.topk_renorm import kernel

G = random(0)
S = torch.randn(2, 9, 16, generator=G)
MASK = torch.rand(2, 9, generator=G) > 0.3


def empty_like(results):
    return tuple(torch.full_like(x, 77) for x in results)


@pytest.mark.parametrize("scale", [1.0, *(0.5 + 0.1 * n for n in range(6))])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("op", [moe_mlir.topk_renorm, moe_mlir.grouped_topk])
def test_selections(op, index_dtype, scale):
    options = dict(mask=MASK, index_dtype=index_dtype, route_scale=scale)
    wanted = op(S, 4, **options)
    out = empty_like(wanted)
    addresses = [x.data_ptr() for x in out]
    found = op(S, 4, **options, out=out)
    assert all(a is b for a, b in zip(found, out)) and addresses == [x.data_ptr() for x in found]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("n", (0, 1, 40))
def test_any_number_of_tokens(n):
    x = torch.randn(n, 16, generator=random(n))
    out = empty_like(moe_mlir.topk_renorm(x, 3))
    assert torch.equal(moe_mlir.topk_renorm(x, 3, out=out)[0], moe_mlir.topk_renorm(x, 3)[0])


def test_a_result_that_is_strided_or_an_operand_is_copied_to():
    wanted = moe_mlir.topk_renorm(S, 4)
    apart = torch.zeros(2, 9, 8)[..., ::2], torch.zeros(2, 9, 4, dtype=torch.int64)
    assert torch.equal(moe_mlir.topk_renorm(S, 4, out=apart)[0], wanted[0])
    same = S.clone()
    out = same[..., :4], wanted[1].clone()
    assert torch.equal(moe_mlir.topk_renorm(same, 4, out=out)[0], wanted[0])


def layer(dtype=torch.float32, hidden=64):
    x = torch.randn(2, 9, 64, generator=random(1)).to(dtype)
    gates, indices = moe_mlir.topk_renorm(torch.randn(2, 9, 8, generator=random(2)), 2)
    weights = [torch.randn(*shape, generator=random(3)).to(dtype) / 8
               for shape in ((8, hidden, 64), (8, 64, hidden))]
    return x, gates, indices, *weights


def test_combine():
    _, gates, indices, *_ = layer()
    slots, offsets, _ = moe_mlir.dispatch(indices, 8)
    rows = torch.randn(int(offsets[-1]), 64, generator=random(4))
    shared = torch.randn(2, 9, 64, generator=random(5))
    for given in (None, shared):
        wanted = moe_mlir.combine(rows, gates, slots, shared=given)
        out = torch.full_like(wanted, 77)
        assert moe_mlir.combine(rows, gates, slots, shared=given, out=out) is out
        assert torch.equal(out, wanted)
    assert torch.equal(moe_mlir.combine(rows, gates, slots, shared=shared, out=shared), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", lambda z: z.sin()],
                         ids=["gelu", "swiglu", "unknown"])
def test_run_experts(activation, dtype):
    x, gates, indices, w_in, w_out = layer(dtype)
    w_out = w_out[..., :32].contiguous() if activation == "swiglu" else w_out
    call = (x, gates, indices, w_in, w_out)
    wanted = run_experts(*call, activation=activation)
    out = torch.full_like(wanted, 77)
    assert run_experts(*call, activation=activation, out=out) is out
    assert torch.equal(out, wanted)


def test_run_experts_of_a_layer_with_panels_and_codes():
    for change in (moe_mlir.pack_experts, moe_mlir.quantize):
        made = moe_mlir.nn.MoELayer(moe_mlir.nn.SMoE(64, 8, 2), 64)
        change(made)
        x, gates, indices, *_ = layer()
        with torch.no_grad():
            wanted = run_experts(x, gates, indices, made.w_in, made.w_out)
            out = torch.empty_like(wanted)
            assert torch.equal(run_experts(x, gates, indices, made.w_in, made.w_out, out=out), wanted)


def test_a_kernel_writes_where_it_is_told():
    x = torch.randn(40, 64, generator=G)
    made = kernel(torch.float32, 64, 8, "logits", True, 1.0, False, torch.int64)
    out = [torch.empty(40, 8), torch.empty(40, 8, dtype=torch.int64)]
    assert made(x, out=out) is out
    assert all(torch.equal(a, b) for a, b in zip(out, moe_mlir.topk_renorm(x, 8)))


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda g, i: (g,), TypeError, "two tensors, gates and indices, found 1 of them"),
    (lambda g, i: g, TypeError, "two tensors, gates and indices, found Tensor"),
    (lambda g, i: (g.double(), i), TypeError, "expected 'out' to have dtype float32"),
    (lambda g, i: (g, i.int()), TypeError, "expected 'out' to have dtype int64"),
    (lambda g, i: (g[:1], i), ValueError, r"expected 'out' to have shape \[tokens of 'scores', k\]"),
    (lambda g, i: (g.to("meta"), i), ValueError, "expected 'out' on cpu, found meta"),
    (lambda g, i: (g.requires_grad_(), i), RuntimeError, "no tensor that needs a gradient"),
])
def test_what_does_not_fit_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        moe_mlir.topk_renorm(S, 4, out=change(*empty_like(moe_mlir.topk_renorm(S, 4))))


def test_run_experts_refuses_what_does_not_fit():
    call = layer()
    for out, error in ((torch.empty(2, 9, 63), ValueError), (torch.empty(18, 64), ValueError),
                       (torch.empty(2, 9, 64).double(), TypeError)):
        for activation in ("gelu", lambda z: z.sin()):
            with pytest.raises(error, match="run_experts: expected 'out' to have"):
                run_experts(*call, activation=activation, out=out)


def test_operands_with_gradients_are_refused():
    x, gates, indices, w_in, w_out = layer()
    for call in (
        lambda: run_experts(x.clone().requires_grad_(), gates, indices, w_in, w_out,
                            out=torch.empty_like(x)),
        lambda: moe_mlir.topk_renorm(S.clone().requires_grad_(), 4,
                                     out=empty_like(moe_mlir.topk_renorm(S, 4))),
    ):
        with pytest.raises(RuntimeError, match="expected no tensor that needs a gradient with 'out'"):
            call()
        with torch.no_grad():
            call()


def test_in_compiled_code_and_in_simulation():
    out = empty_like(moe_mlir.topk_renorm(S, 4))
    function = torch.compile(lambda s, g, i: moe_mlir.topk_renorm(s, 4, out=(g, i))[0] * 2,
                             fullgraph=True, backend="aot_eager")
    twice, wanted = function(S, *out), moe_mlir.topk_renorm(S, 4)
    assert torch.equal(out[0], wanted[0]) and torch.equal(out[1], wanted[1])
    assert torch.equal(twice, 2 * wanted[0])
    again = empty_like(wanted)
    with moe_mlir.simulate(chip="sm_90"):
        moe_mlir.topk_renorm(S, 4, out=again)
    assert torch.equal(again[1], wanted[1])
    torch.testing.assert_close(again[0], wanted[0])
