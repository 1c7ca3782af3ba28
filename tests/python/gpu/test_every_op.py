"""Every forward op of the package on the simulated GPU, against the CPU's kernel."""

import functools

import pytest
import torch

import moe_mlir as m
from moe_mlir.gpu_check.cases import OPS, d, e, operands

CASES = {name: functools.partial(call, m) for name, call in OPS.items()}


@pytest.mark.parametrize("op", CASES)
def test_op_equals_its_cpu_kernel(op):
    expected = CASES[op](operands())
    with m.simulate(chip="sm_90"):
        found = CASES[op](operands())
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
        else:
            assert torch.equal(a, b)


REFUSED = {
    "cosine_logits": (lambda o: m.cosine_logits(o["h"], None, o["weight"]), "found 'f64'"),
    "soft_dispatch": (lambda o: m.soft_dispatch(o["h"], torch.ones(d, e, 2)), "constant bound"),
}


@pytest.mark.parametrize("op", REFUSED)
def test_op_without_a_gpu_form_is_refused(op):
    call, reason = REFUSED[op]
    with m.simulate(chip="sm_90"), pytest.raises(ValueError, match=reason):
        call(operands())
