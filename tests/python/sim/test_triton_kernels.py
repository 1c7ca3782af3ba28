"""Correct kernels of Triton give right results and no finding; with a synchronisation less, one.

A plain run compiles each family for one chip, drawn by the run's seed, and breaks some kernels; a
long run does the rest.
`triton_kernels/table.py` prints the figures.
"""

import random

import pytest
from seeds import run_seed, some

triton = pytest.importorskip(
    "triton", reason="Triton is not installed; requirements.txt pins it for Linux on x86-64")

from mutation import judge, run_mutants  # noqa: E402
from triton_kernels import CASES, CHIPS, FAMILIES, POLICIES, SEEDS  # noqa: E402
from triton_kernels.synchronisations import deletions, proof  # noqa: E402

BROKEN, SAMPLE = 4, 6  # kernels that a plain run breaks, and mutants of each
DOUBTED = 60  # caught mutants of each chip that a long run tries to prove correct
# Of the mutants of all chips that are not proven to be correct kernels, 97.7 % are caught; most of
# the others are barriers of sm_90's warp-specialised and descriptor kernels.
TARGETS = {"sm_80": 0.98, "sm_89": 0.98, "sm_90": 0.96}
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


def judge_mutants(jobs, record_property, doubted=0):
    """(outcomes of those that were missed, how many there were beside those proven redundant).

    None may hang, crash, or be caught against a proof. Proofs by traces, which take seconds, are
    asked for what was missed and for `doubted` of those that were caught.
    """
    cases = {case.name: case for case in CASES}
    outcomes = run_mutants(jobs, workers=1, corpus="triton_kernels")
    broken = [o for o in outcomes if o.how in ("invalid", "crash", "hang")]
    assert not broken, broken
    caught = [o.name for o in outcomes if o.how]
    traced = set(random.Random(run_seed()).sample(caught, min(doubted, len(caught))))
    proven = [o for o in outcomes
              if proof(cases[o.case], o.key, traced=not o.how or o.name in traced)]
    false = [o for o in proven if o.how]
    assert not false, false
    missed = [o for o in outcomes if not o.how and o not in proven]
    record_property("sim_mutants", len(outcomes) - len(proven))
    record_property("sim_caught", len(outcomes) - len(proven) - len(missed))
    record_property("sim_redundant", len(proven))
    return missed, len(outcomes) - len(proven)


def test_some_kernels_with_a_synchronisation_less(record_property):
    draw = random.Random(run_seed())
    jobs = []
    for index in draw.sample(range(len(CASES)), len(CASES)):
        found = deletions(CASES[index])
        jobs += [(index, m) for m in draw.sample(found, min(SAMPLE, len(found)))]
        if len(jobs) >= BROKEN * SAMPLE:
            break
    missed, _ = judge_mutants(jobs, record_property)
    assert len(missed) <= len(jobs) // 4, missed


@pytest.mark.parametrize("name", ["spin_lock", "chained_scan", "sum_by_the_last", "grid_barrier"])
def test_a_trace_proves_nothing_of_a_kernel_that_waits_for_other_blocks(name):
    """The block that was traced found the lock free; another one turns once more."""
    case = next(c for c in CASES if c.family is FAMILIES[name] and c.chip == "sm_80")
    for mutant in deletions(case):
        assert proof(case, mutant.key) == proof(case, mutant.key, traced=False)


def test_a_barrier_before_the_proxy_fence_of_the_reader_is_needed():
    """What other warps copied by cp.async, a wgmma reads behind the barrier and its own fence."""
    case = next(c for c in CASES if c.family is FAMILIES["matmul_int8"] and c.chip == "sm_90")
    barrier = next(m for m in deletions(case) if m.operator == "delete-barrier")
    assert judge(case, barrier)[0] == "race"
    assert proof(case, barrier.key) is None


@pytest.mark.long
@pytest.mark.parametrize("chip", CHIPS)
def test_all_kernels_with_a_synchronisation_less(chip, record_property):
    jobs = [(i, m) for i, case in enumerate(CASES) if case.chip == chip for m in deletions(case)]
    missed, judged = judge_mutants(jobs, record_property, doubted=DOUBTED)
    for o in missed:
        record_property("sim_missed", o.name)
    assert len(missed) <= (1 - TARGETS[chip]) * judged, missed
