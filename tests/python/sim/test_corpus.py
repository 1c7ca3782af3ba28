"""Correct kernels give right results and no finding, whatever the schedule."""

import numpy as np
import pytest
from corpus import CASES

SEEDS = 20
POLICIES = (0, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_no_schedule_makes_a_finding_or_a_wrong_result(
    case, record_property
):
    alarms, launches, wrong = [], 0, []
    for seed in range(SEEDS):
        for policy in POLICIES:
            report, _, bad = case.launch(seed, policy, data=seed)
            launches += 1
            if not report.ok:
                alarms.append((seed, policy, str(report)))
            if bad:
                wrong.append((seed, policy, bad))
    record_property("sim_kernels", 1)
    record_property("sim_launches", launches)
    record_property("sim_alarms", len(alarms))
    assert not wrong, f"(seed, policy, wrong outputs): {wrong}"
    assert not alarms, "seed {}, policy {}:\n{}".format(*alarms[0])


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_runs(case, policy):
    runs = [case.launch(7, policy, threads=threads) for threads in (1, 1, 0)]
    for report, arrays, _ in runs[1:]:
        assert str(report) == str(runs[0][0])
        assert report.counters == runs[0][0].counters
        for array, first in zip(arrays, runs[0][1]):
            assert np.array_equal(array, first, equal_nan=False)


def test_seeds_give_different_schedules():
    case = next(c for c in CASES if c.kernel == "slots")
    orders = {case.launch(seed, 0)[1][2].tobytes() for seed in range(SEEDS)}
    assert len(orders) > 1, "every seed served the atomics in the same order"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("numerics", ["tensor_core", "perturbed"])
def test_other_numerics_stay_within_tolerance(case, numerics):
    report, _, wrong = case.launch(3, 1, numerics=numerics)
    assert report.ok, str(report)
    assert not wrong
