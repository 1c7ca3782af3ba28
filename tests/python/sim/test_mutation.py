"""The share of broken kernels that the simulator catches.

A mutant is caught by a finding or by a result outside the tolerance. Mutants
that are still correct programs stand, each with its proof, in
redundant-mutants.json; they must not be caught, or the proof is wrong or the
simulator gives a false alarm.
"""

import json
import random
from pathlib import Path

import pytest
from mutation import all_jobs, run_mutants
from seeds import run_seed

REDUNDANT = (
    Path(__file__).parents[2] / "Simulator" / "redundant-mutants.json"
)
TARGET = 0.95
# Of the mutants this share, drawn by the seed of the run; a long run takes all.
SHARE = 1 / 3


@pytest.fixture(scope="module")
def proofs():
    return {p["mutant"]: p for p in json.loads(REDUNDANT.read_text())}


@pytest.fixture(scope="module", params=["drawn", pytest.param("all", marks=pytest.mark.long)])
def outcomes(request):
    jobs = all_jobs()
    if request.param == "drawn":
        jobs = random.Random(run_seed()).sample(jobs, round(len(jobs) * SHARE))
    return run_mutants(jobs)


def describe(outcomes):
    return "\n".join(
        f"{o.name} line {o.line}: {o.before!r} -> {o.after!r} {o.detail}"
        for o in outcomes
    )


def test_share_of_caught_mutants(outcomes, proofs, record_property):
    judged = [o for o in outcomes if o.name not in proofs]
    caught = [o for o in judged if o.how]
    share = len(caught) / len(judged)
    record_property("sim_mutants", len(judged))
    record_property("sim_caught", len(caught))
    record_property("sim_redundant", len(outcomes) - len(judged))
    missed = [o for o in judged if not o.how]
    for o in missed:
        record_property("sim_missed", o.name)
    assert share >= TARGET, describe(missed)


def test_every_mutant_loads_and_ends(outcomes):
    broken = [o for o in outcomes if o.how in ("invalid", "crash", "hang")]
    assert not broken, describe(broken)


def test_redundant_mutants_are_clean(outcomes, proofs):
    caught = [o for o in outcomes if o.name in proofs and o.how]
    assert not caught, describe(caught)


def test_each_proof_is_of_a_mutant_that_exists(proofs):
    from corpus import CASES

    statements = {
        f"{CASES[index].name}:{m.key}": m.before for index, m in all_jobs()
    }
    for name, proof in proofs.items():
        assert statements.get(name) == proof["statement"], name
        assert len(proof["proof"]) > 40, f"{name} has no proof"
