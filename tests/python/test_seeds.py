"""New examples each run, the same ones for the same MOE_MLIR_SEED."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import seeds

HERE = Path(__file__).parent
PROPERTY = """
from hypothesis import given, strategies as st

@given(st.integers(0, 2**60))
def test_draws(number):
    print("drew", number)
"""


@pytest.fixture
def draw(tmp_path):
    """draw(seed): (the seed that was printed, the numbers drawn) of a run of its own."""
    (tmp_path / "test_property.py").write_text(PROPERTY)
    for name in ("conftest.py", "costs.py", "seeds.py", "quick.py"):
        (tmp_path / name).write_text((HERE / name).read_text())

    def run(seed=None, check=True):
        environment = {k: v for k, v in os.environ.items() if k != "MOE_MLIR_SEED"}
        if seed is not None:
            environment["MOE_MLIR_SEED"] = seed
        # CI=1 makes hypothesis repeat the same examples unless told otherwise.
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_property.py"],
            cwd=tmp_path, env=dict(environment, CI="1"), capture_output=True, text=True)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        printed = re.search(r"^seed: (\d+)", done.stdout, re.MULTILINE)
        return printed and printed[1], re.findall(r"drew (\d+)", done.stdout), done.stderr

    return run


def test_each_run_draws_new_examples_and_its_seed_repeats_them(draw):
    seed, first, _ = draw()
    other, second, _ = draw()
    assert len(first) >= 50 and seed != other and first != second
    assert draw(seed)[:2] == (seed, first)


def test_a_seed_that_is_no_number_is_named(draw):
    _, _, error = draw("abc", check=False)
    assert "expected an integer in MOE_MLIR_SEED, found 'abc'" in error


def test_one_case_of_each_kind_runs_always_and_the_others_in_a_long_run(monkeypatch):
    drawn = set()
    for seed in range(20):
        monkeypatch.setenv("MOE_MLIR_SEED", str(seed))
        cases = seeds.some(range(6), by=lambda n: n % 2)
        assert [case.values for case in cases] == [(n,) for n in range(6)]
        plain = [case.values[0] for case in cases if not case.marks]
        assert sorted(n % 2 for n in plain) == [0, 1]
        assert all(case.marks in ((), (pytest.mark.long,)) for case in cases)
        drawn.update(plain)
    assert drawn == set(range(6))


DRAWN = """
import pytest

@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", range(7))
def test_case(case):
    print(f"ran {case}.")

@pytest.mark.drawn(2, like="test_cases.py::test_case")
@pytest.mark.parametrize("case", "abcdefg")
def test_like_it(case):
    print(f"ran too: {case}.")
"""


def test_cases_are_drawn_and_a_long_run_has_the_others(tmp_path):
    (tmp_path / "test_cases.py").write_text(DRAWN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n drawn(n)\n")
    for name in ("conftest.py", "costs.py", "seeds.py", "quick.py"):
        (tmp_path / name).write_text((HERE / name).read_text())

    def ran(*arguments, seed="5"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path, env={**os.environ, "MOE_MLIR_SEED": seed}, capture_output=True, text=True)
        numbers, letters = (re.findall(text, done.stdout) for text in (r"ran (\d)\.", r"ran too: (\w)\."))
        assert [int(number) for number in numbers] == ["abcdefg".index(x) for x in letters] \
            or any("test_case" in argument for argument in arguments)
        return {int(number) for number in numbers}

    plain, long = ran("-m", "not long"), ran("-m", "long")
    assert len(plain) == 2 and plain.isdisjoint(long) and plain | long == {*range(7)}
    assert any(ran("-m", "not long", seed=str(seed)) != plain for seed in range(4))
    # Who asks for tests by name gets them all.
    assert ran("-m", "not long", "-k", "test_case") == {*range(7)}
    assert ran("-m", "not long", "test_cases.py::test_case") == {*range(7)}
