"""What Triton's own code does against the PTX ISA: docs/TritonKernels.md explains each.

A test that fails here because nothing is found any more means that a later Triton emits other code:
the page then says too much.
"""

import re
import struct

import pytest

from moe_mlir import sim

triton = pytest.importorskip(
    "triton", reason="Triton is not installed; requirements.txt pins it for Linux on x86-64")

from triton_kernels import FAMILIES  # noqa: E402
from triton_kernels.family import Data  # noqa: E402

AGAIN = "executes setmaxnreg again"
ANOTHER = "expected all warps of the warpgroup to execute the same setmaxnreg"


def setmaxnreg_findings(chip, **options):
    family = FAMILIES["matmul_warp_specialised"]
    kernels = family.compile(chip)
    found = []
    for policy in (0, 1):
        (report,), right = family.run(kernels, chip, policy, policy, **options)
        assert right
        found += [f.message for f in report.findings if "setmaxnreg" in f.message]
    return kernels[0].asm["ptx"], found


def test_workers_ask_twice_for_the_same_registers():
    """Behind their work, and at the head of the loop in which they wait for the next."""
    ptx, found = setmaxnreg_findings("sm_90", allow=())
    assert found and all(AGAIN in message for message in found), found
    lines = [line.strip() for line in ptx.split("\n")]
    requests = [line for line in lines if line.startswith(("setmaxnreg", "barrier.sync"))]
    assert any(a == b and a.startswith("setmaxnreg") for a, b in zip(requests, requests[1:]))
    assert not setmaxnreg_findings("sm_90")[1]


def test_warps_of_one_warpgroup_ask_by_different_instructions():
    """On sm_120 the loading warps and the idle ones are one warpgroup."""
    _, found = setmaxnreg_findings("sm_120")
    assert found and all(ANOTHER in message for message in found), found


def test_lanes_round_one_sum_differently_where_multiply_adds_are_fused():
    """Lane a has fma(x, y, b's product) and lane b fma(z, w, a's product): both are "the" sum."""
    problem = FAMILIES["attention_paged_decode"].build(Data(0, "sm_80"))
    step = problem.steps[0]

    def messages(fused):
        kernel = sim.compile_triton(step.kernel, step.args, chip="sm_80",
                                    **{**step.options, "enable_fp_fusion": fused})
        return [f.message for f in sim.launch_triton(kernel, step.grid, step.args).findings]

    assert messages(False) == []
    found = messages(True)
    assert found
    for message in found:
        words = re.search(r"race of lanes: stores (\w+) to shared memory.*, (\w+); one of", message)
        a, b = (struct.unpack("f", struct.pack("I", int(word, 16)))[0] for word in words.groups())
        assert a != b and abs(a - b) < 1e-5 * max(1, abs(a)), message
