"""The layers of experts on tensor cores: a run of rows times its expert's weights."""

import pytest
import torch
from gpu_kernels import compile_function

from moe_mlir_bench.gpu_check.modules import experts_text

pytest.importorskip("moe_mlir.sim")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width, hidden, transposed", [
    (64, 48, False), (72, 33, False), (200, 300, False), (64, 48, True), (72, 200, True),
    (136, 16, True),
])
@pytest.mark.parametrize("lengths", [[70, 0, 1, 16], [0, 0, 0, 0], [3, 130, 64, 17]])
def test_runs_of_rows(dtype, width, hidden, transposed, lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    x = torch.randn(int(offsets[-1]), width, generator=generator).to(dtype)
    w = (torch.randn(len(lengths), hidden, width, generator=generator) / width**0.5).to(dtype)
    old = torch.randn(x.shape[0], hidden, generator=generator)
    expected = old.double()
    for e in range(len(lengths)):
        rows = slice(offsets[e], offsets[e + 1])
        expected[rows] += x[rows].double() @ w[e].double().T
    if transposed:
        w = w.mT.contiguous()
    function = compile_function(experts_text(len(lengths), width, hidden, dtype, transposed))
    first = None
    for options in ({"seed": 1}, {"seed": 2, "policy": 1}):
        y = torch.full_like(old, 77.0)
        reports = function(x, w, offsets, old, y, **options)
        assert not any(report.findings for report in reports)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=4e-6)
        assert first is None or torch.equal(first, y)
        first = y
    instructions = {name for report in reports for name in report.counters["instructions"]}
    assert any(name.startswith("mma.sync") for name in instructions) == bool(x.numel())


def test_rows_of_other_widths_are_summed_by_the_float_units():
    x, w = torch.randn(5, 12).bfloat16(), torch.randn(2, 3, 12).bfloat16()
    y = torch.empty(5, 3)
    reports = compile_function(experts_text(2, 12, 3, torch.bfloat16))(
        x, w, torch.tensor([0, 2, 5]), torch.zeros(5, 3), y)
    assert not any("mma" in name for r in reports for name in r.counters["instructions"])
    expected = torch.cat([x[:2].double() @ w[0].double().T, x[2:].double() @ w[1].double().T])
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=4e-6)
