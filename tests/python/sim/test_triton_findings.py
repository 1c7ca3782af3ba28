"""What Triton's own code does against the PTX ISA: docs/TritonKernels.md explains each.

A test that fails here because nothing is found any more means that a later Triton emits other code:
the page then says too much.
"""

import pytest

triton = pytest.importorskip(
    "triton", reason="Triton is not installed; requirements.txt pins it for Linux on x86-64")

from triton_kernels import FAMILIES  # noqa: E402

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
