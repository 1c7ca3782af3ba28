"""Every forward op of the package on the simulated GPU, against the CPU's kernel."""

import functools

import pytest
import torch

import moe_mlir as m
from moe_mlir.gpu_check.cases import OPS, operands

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

