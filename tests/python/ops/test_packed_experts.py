"""Weights of experts in panels: the same bits as without, and never taken for anything else."""

import itertools

import pytest
import torch
from expert_problems import FORMS, SWIGLU, call, problem, rounded

from moe_mlir.experts import run_experts
from moe_mlir.ops._panels import pack_weight, unpack_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# No multiples of anything, less than a vector, a panel and a bit, several chains.
SIZES = [(33, 10), (7, 2), (64, 96), (300, 72)]


def packed(values, act):
    x, gates, indices, w_in, w_out, *biases = values
    return (x, gates, indices, pack_weight(w_in, halves=act.gate == "concatenated"),
            pack_weight(w_out, halves=False), *biases)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_panels_are_the_weight(dtype, halves):
    for out, width in itertools.product((2, 64, 130), (1, 5, 64)):
        w = torch.randn(3, width, out).to(dtype).mT
        assert torch.equal(unpack_weight(pack_weight(w, halves=halves), out, width), w)


class Elsewhere(torch.Tensor):
    """A tensor that is packed by torch, as one on another device is."""


# Of a weight [3, out, width] in memory: as it is, transposed, every other element of each dim.
STRIDES = {
    "rows": lambda w: w.contiguous(),
    "transposed": lambda w: w.mT.contiguous().mT,
    "apart": lambda w: w.repeat_interleave(2, 0).repeat_interleave(2, 1).repeat_interleave(
        2, 2)[::2, 1::2, ::2],
    "odd rows": lambda w: torch.nn.functional.pad(w, (0, 1))[..., :-1],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_weights_of_all_strides_have_the_panels_that_torch_makes(dtype, strides):
    for out, width, halves in itertools.product((2, 64, 130), (1, 5, 64, 300), (False, True)):
        w = STRIDES[strides](torch.randn(3, out, width).to(dtype))
        expected = pack_weight(w.as_subclass(Elsewhere), halves=halves)
        assert torch.equal(pack_weight(w, halves=halves), expected)
    for shape in ((0, 64, 8), (2, 64, 0)):
        assert pack_weight(torch.randn(shape).to(dtype), halves=True).numel() == 0


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("form", "dtype"), [
    *((form, torch.float32) for form in FORMS),
    *itertools.product(("none", "swiglu"), (torch.bfloat16, torch.float16)),
])
def test_panels_give_the_same_bits(form, dtype):
    for width, hidden in SIZES if form in ("none", "swiglu") else SIZES[:1]:
        # Rows of an expert: few, and more than a tile.
        for tokens in (0, 1, 9, 60):
            values = rounded(problem(width, hidden, FORMS[form], tokens=tokens), dtype)
            assert torch.equal(call(packed(values, FORMS[form]), FORMS[form]),
                               call(values, FORMS[form]))


def test_the_rows_of_x_have_a_gradient_and_the_panels_none():
    values = problem(16, 12)
    plain = rounded(values, torch.float32)
    panels = list(packed(plain, SWIGLU))
    plain[0] = plain[0].requires_grad_()
    panels[0] = plain[0].detach().clone().requires_grad_()
    for given in (plain, panels):
        call(given, SWIGLU).square().sum().backward()
    torch.testing.assert_close(panels[0].grad, plain[0].grad)
    panels[3].requires_grad_()
    with pytest.raises(RuntimeError, match="there is no gradient; call moe_mlir.unpack_experts"):
        call(panels, SWIGLU).sum().backward()


def test_meta_tensors_give_the_shape():
    x, *rest = packed(rounded(problem(16, 12), torch.float32), SWIGLU)
    y = call([t if t is None else t.to("meta") for t in (x, *rest)], SWIGLU)
    assert y.shape == x.shape and y.is_meta


@pytest.mark.parametrize(("change", "message"), [
    (lambda v: v.update(w_in=v["plain_in"]), "both weights in panels and none transposed"),
    (lambda v: v.update(transposed=True), "both weights in panels and none transposed"),
    (lambda v: v.update(activation=FORMS["gpt-oss"]), "of panels for gate 'interleaved'"),
    (lambda v: v.update(activation=torch.sigmoid), "an activation that kernels know"),
    (lambda v: v.update(x=v["x"].bfloat16()), "expected 'w_in' to have the dtype of 'h'"),
    (lambda v: v.update(x=v["x"][:, :-1]), "expected 'w_in' to have shape"),
])
def test_panels_of_another_form_are_refused(change, message):
    plain = rounded(problem(16, 12, bias=False), torch.float32)
    x, gates, indices, w_in, w_out, _, _ = packed(plain, SWIGLU)
    values = dict(x=x, w_in=w_in, plain_in=plain[3], activation=SWIGLU, transposed=False)
    change(values)
    with pytest.raises((ValueError, TypeError), match=message):
        run_experts(values["x"], gates, indices, values["w_in"], w_out,
                    activation=values["activation"], transposed=values["transposed"])
