"""Every router of docs/Spec.md section 4 on the simulated GPU: results and gradients.

Kernels that find a race, an access out of bounds or an unset value raise.
"""

import pathlib
import sys

import pytest
import torch

import moe_mlir

pytest.importorskip("moe_mlir.sim")

for folder in ("nn", "ops"):
    sys.path.append(str(pathlib.Path(__file__).parent.parent / folder))

from methods import METHODS, D, make, normal  # noqa: E402
from op_judge import random  # noqa: E402

H = normal(2, 9, D)
MASK = torch.rand(2, 9, generator=random(5)) > 0.3


def run(name, impl):
    """Choices, then gates and the gradients of tokens and parameters."""
    router, inputs = make(name, impl)
    h = H.clone().requires_grad_()
    routing = router(h, MASK, **inputs)
    total = (routing.combine if routing.combine is not None else routing.gates)[MASK].square()
    if total.requires_grad:
        total.sum().backward()
    gradients = [x.grad for x in (h, *router.parameters()) if x.grad is not None]
    return routing.indices, [routing.gates[MASK].detach(), *gradients]


@pytest.mark.parametrize("name", METHODS)
def test_equals_plain_torch_whatever_the_schedule(name):
    indices, values = run(name, "torch")
    runs = []
    for schedule in ({"seed": 1}, {"seed": 2, "policy": 1}):
        with moe_mlir.simulate(chip="sm_90", **schedule) as simulation:
            runs.append(run(name, "moe"))
        assert simulation.reports
    for found_indices, found in runs:
        assert torch.equal(found_indices, indices)
        for a, b in zip(found, values, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(a, b)
