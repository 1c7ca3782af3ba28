"""Every forward op of the package on the simulated GPU, judged by its meaning in float64."""

import functools

import pytest
import torch

import moe_mlir as m
from moe_mlir import reference
from moe_mlir_bench.gpu_check.cases import OPS, operands

CASES = {name: functools.partial(call, m) for name, call in OPS.items()}


def wide(operands):
    return {name: x.double() if x.is_floating_point() else x for name, x in operands.items()}


def judge(op, found):
    """Compares the results of an op on `operands()` with the reference."""
    expected = OPS[op](reference, wide(operands()))
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        if a.is_floating_point():
            # Twice the bound of docs/Spec.md, section 1, for logits of about 4.
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=4e-6, equal_nan=True)
        else:
            assert torch.equal(a.long(), b.long())


@pytest.mark.parametrize("op", CASES)
def test_op_equals_its_meaning(op):
    of_cpu = CASES[op](operands())
    with m.simulate(chip="sm_90"):
        found = CASES[op](operands())
    judge(op, found)
    if isinstance(found, torch.Tensor):
        found, of_cpu = (found,), (of_cpu,)
    assert [a.dtype for a in found] == [b.dtype for b in of_cpu]
