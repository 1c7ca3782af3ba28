"""Gradients on the simulated GPU, judged by those of the meaning in float64; a finding is an
error."""

import pytest
import torch

import moe_mlir
from moe_mlir import reference
from moe_mlir_bench.gpu_check.gradients import CASES, gradients

pytest.importorskip("moe_mlir.sim")

@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_the_meaning(name):
    call, values = CASES[name]
    expected = gradients(reference, call, [value.double() for value in values])
    with moe_mlir.simulate(chip="sm_90") as simulation:
        found = gradients(moe_mlir, call, values)
    # Forward and backward each ran kernels.
    assert len(simulation.reports) >= 2
    for a, b in zip(found, expected, strict=True):
        # 20 times the forward bound, scaled by the largest gradient (docs/Spec.md, section 1).
        bound = 20 * 2e-6 * max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a.double(), b, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["softmax_of_topk", "similarity", "posterior"])
def test_gradients_do_not_depend_on_the_schedule(name):
    call, values = CASES[name]
    runs = []
    for options in ({"seed": 1}, {"seed": 2, "policy": 1}):
        with moe_mlir.simulate(chip="sm_90", **options):
            runs.append(gradients(moe_mlir, call, values))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
