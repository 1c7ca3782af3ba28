"""softmax_mix on warpgroups: the kernel of sm_90a, executed in the PTX simulator.

The judge is that of the other kernels. What is particular to this one is its
rings of slots in shared memory, so lengths and widths go around them.
"""

import json
import math
import re

import pytest
import torch
from test_softmax_mix import (
    BF16,
    F16,
    F32,
    LAUNCHES,
    check,
    module_text,
    problem,
    problem_with_garbage_at_masked_tokens,
)  # fmt: skip

from moe_mlir.compiler.jit import compile_kernels_cached, compile_ptx_cached
from moe_mlir.gpu.launch import LaunchPlan
from moe_mlir.sim.simulation import device_function

sim = pytest.importorskip("moe_mlir.sim")

CHIP = "sm_90a"


def check_wgmma(p, launches=LAUNCHES[:1]):
    assert "wgmma.mma_async" in compile_ptx_cached(module_text(p)[0], CHIP)
    return check(p, launches, chip=CHIP)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("d, e", [(8, 1), (16, 16), (40, 64), (72, 33), (24, 200), (200, 256)])
def test_widths_and_columns(dtype, d, e):
    check_wgmma(problem(70, 70, d, e, dtype=dtype, causal=True))


@pytest.mark.parametrize("n, nk", [(0, 0), (0, 5), (1, 1), (1, 130), (65, 64), (7, 0), (129, 200)])
@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_tokens(n, nk, causal):
    check_wgmma(problem(n, nk, 32, 8, dtype=BF16, causal=causal), LAUNCHES)


@pytest.mark.parametrize("d", [352, 512, 520, 1024, 1288])
def test_wide_features(d):
    """Up to 8 chunks are straight code, more of them a loop and the rest."""
    check_wgmma(problem(33, 200, d, 16, dtype=BF16, norm=30.0), LAUNCHES)


@pytest.mark.parametrize("d", [352, 1024])
def test_tf32_sums_all_chunks_on_tensor_cores(d):
    check_wgmma(problem(33, 200, d, 16, dtype=BF16, norm=30.0, precision="tf32"), LAUNCHES)


@pytest.mark.parametrize("value_dtype", [F32, BF16, F16])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_values_of_another_type(value_dtype, precision):
    check_wgmma(problem(30, 80, 64, 24, dtype=F16, value_dtype=value_dtype, precision=precision))


def test_batches_and_heads():
    check_wgmma(problem(140, 150, 24, 8, batch=2, heads=3, dtype=BF16, causal=True), LAUNCHES)


def test_log_sum_exp_and_entropy_alone():
    check_wgmma(problem(70, 70, 32, 0, heads=2, dtype=BF16, entropy=True, causal=True), LAUNCHES)


@pytest.mark.parametrize("norm", [1.0, 352.0])
def test_entropy_with_values(norm):
    check_wgmma(problem(70, 70, 32, 8, dtype=BF16, entropy=True, norm=norm))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("exclude_self, window", [(True, None), (False, 1), (True, 70)])
def test_visibility(causal, exclude_self, window):
    check_wgmma(problem(200, 200, 16, 8, dtype=BF16, causal=causal, exclude_self=exclude_self,
                        window=window))


def test_garbage_at_masked_tokens_does_not_leak():
    check_wgmma(problem_with_garbage_at_masked_tokens(BF16), LAUNCHES)


def test_levels_and_biases():
    p = problem(90, 90, 16, 8, heads=2, dtype=BF16, scale=0.5, causal=True)
    g = torch.Generator().manual_seed(5)
    level = torch.rand(1, 90, generator=g)
    p.operands = {
        "key_bias": torch.randn(1, 2, 90, generator=g),
        "bias": torch.randn(1, 1, 90, 90, generator=g),
        "query_level": level, "key_level": level.clone(),
    }
    p.operands["key_bias"][0, 0, 7] = -math.inf
    check_wgmma(p)


@pytest.mark.parametrize("numerics", ["tensor_core", "perturbed"])
def test_holds_on_real_arithmetic_units(numerics):
    p = problem(64, 200, 352, 16, dtype=BF16, norm=30.0)
    check_wgmma(p, [{"seed": 3, "numerics": numerics}])


@pytest.mark.parametrize("d, e", [(128, 16), (72, 40), (64, 200)])
def test_meets_no_bank_conflicts(d, e):
    (report,) = check_wgmma(problem(128, 128, d, e, dtype=BF16))
    assert report.counters["shared_wavefronts"] == report.counters["shared_requests"]


@pytest.mark.parametrize("chip", ["sm_90", "sm_100"])
def test_other_chips_have_no_wgmma(chip):
    text, _, _ = module_text(problem(20, 20, 64, 16, dtype=BF16))
    ptx = compile_ptx_cached(text, chip)
    assert "wgmma" not in ptx and "mma.sync" in ptx


@pytest.mark.parametrize("d, e", [(13, 16), (64, 288), (2048, 16)])
def test_what_has_no_form_keeps_its_kernel(d, e):
    """Rows without alignment, columns in groups, queries beyond shared memory."""
    p = problem(20, 70, d, e, dtype=BF16)
    assert "wgmma" not in compile_ptx_cached(module_text(p)[0], CHIP)
    check(p, LAUNCHES[:1], chip=CHIP)


@pytest.mark.parametrize(
    "line",
    [
        r"wgmma\.wait_group\.sync\.aligned 0;",
        r"wgmma\.fence\.sync\.aligned;",
        r"fence\.proxy\.async\.shared::cta;",
        r"mbarrier\.try_wait\.parity\.shared::cta\.b64 done, .*;\s*@!done bra again;",
    ],
)
def test_a_missing_synchronisation_is_found(line):
    """What the other tests rely on: the simulator does not overlook it."""
    text, inputs, results = module_text(problem(130, 200, 64, 16, dtype=BF16))
    code = json.loads(compile_kernels_cached(text, CHIP))
    ptx, count = re.subn(line, "", code["ptx"])
    assert count > 0
    (function,) = code["functions"]
    (report,) = device_function(ptx, LaunchPlan(function))(*inputs, *results, seed=1)
    assert any(finding.kind == "race" for finding in report.findings)
