"""Correct kernels of Triton give right results and no finding.

A plain run compiles each family for one chip, drawn by the run's seed; a long run does the rest.
`triton_kernels/table.py` prints the figures.
"""

import pytest
from seeds import some

triton = pytest.importorskip(
    "triton", reason="Triton is not installed; requirements.txt pins it for Linux on x86-64")

from triton_kernels import CHIPS, FAMILIES, POLICIES, SEEDS  # noqa: E402

PAIRS = [(name, chip) for name, family in FAMILIES.items() for chip in family.chips]


@pytest.mark.parametrize("name, chip", some(PAIRS, by=lambda pair: pair[0]))
def test_correct_kernels_are_right_and_clean(name, chip, record_property):
    family = FAMILIES[name]
    kernels = family.compile(chip)
    launches, findings, wrong = 0, [], []
    for seed in SEEDS:
        for policy in POLICIES:
            reports, right = family.run(kernels, chip, seed, policy)
            launches += len(reports)
            wrong += [] if right else [(seed, policy)]
            findings += [finding for report in reports for finding in report.findings]
    alarms = [f for f in findings if not family.is_own(f)]
    record_property("sim_kernels", len(kernels))
    record_property("sim_launches", launches)
    record_property("sim_alarms", len(alarms))
    assert not wrong, f"(seed, policy) with a wrong result: {wrong}"
    assert not alarms, alarms[0].message
    assert bool(findings) == bool(family.own_race), "Triton's own race is no longer found"


def test_fifty_families_for_each_chip():
    for chip in CHIPS:
        assert sum(chip in family.chips for family in FAMILIES.values()) >= 50
