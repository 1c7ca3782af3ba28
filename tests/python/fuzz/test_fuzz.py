"""A short run of every target of utils/fuzz; `python utils/fuzz all --seconds 600` is a long one."""

import collections
import random
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import run_seed
from support import BUILD, run_python

FUZZ = Path(__file__).resolve().parents[3] / "utils/fuzz"
sys.path.insert(0, str(FUZZ))

import ir  # noqa: E402
import modules  # noqa: E402


def fuzz(tmp_path, *arguments):
    # Most targets need no torch.
    return run_python(FUZZ, *arguments, "--build", BUILD, "--compiler", BUILD, "--out", tmp_path,
                      fresh=True, timeout=600)


@pytest.mark.parametrize("target, runs", [
    ("json", 5000), ("sizes", 5000), ("npy", 3000), ("weights", 3000), ("artifact", 300),
    ("calls", 1500), ("ptx", 400), ("kernels", 60), ("ir", 80)])
def test_changed_inputs_are_refused_with_a_reason(tmp_path, target, runs):
    done = fuzz(tmp_path, target, "--runs", runs, "--seed", run_seed())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{runs} inputs" in done.stdout and "0 findings" in done.stdout


def run_program(script, *arguments):
    """What a program of random examples prints; in a process of its own, which a signal ends."""
    done = run_python(Path(__file__).with_name(script), *arguments, timeout=7200)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def compare_index_programs(seed, programs, calls):
    refused = int(run_program("index_programs.py", seed, programs, calls).split()[2])
    assert 0 < refused < programs * calls


def test_compiled_programs_refuse_what_eager_refuses():
    compare_index_programs(run_seed(), 2, 200)


@pytest.mark.long
def test_many_compiled_programs_refuse_what_eager_refuses():
    compare_index_programs(run_seed(), 20, 5000)


@pytest.mark.parametrize("steps", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_compiled_models_follow_changes_as_eager_does(steps):
    assert run_program("model_states.py", run_seed(), steps).startswith(f"{steps} steps, ")


@pytest.mark.parametrize("steps", [30, pytest.param(4000, marks=pytest.mark.long)])
def test_compiled_decoding_keeps_caches_as_eager_does(steps):
    assert run_program("cache_states.py", run_seed(), steps).startswith(f"{steps} steps, ")


@pytest.mark.parametrize("tables, kernels", [
    (2000, 3), pytest.param(200_000, 100, marks=pytest.mark.long)])
def test_tables_of_numbers_are_refused_or_change_no_bit(tables, kernels):
    printed = run_program("tuning_tables.py", run_seed(), tables, kernels)
    assert printed.startswith(f"{tables} tables, ") and f" {kernels} kernels" in printed


def test_a_difference_of_compiled_models_ends_the_run(monkeypatch):
    """So that the checks above can fail: the twin misses a change."""
    import model_states

    monkeypatch.setattr(model_states, "CHEAP", [lambda model, draw: model.plain.mul_(
        0.5 if model is pair.compiled.model else 1.0)])
    pair = model_states.Pair(random.Random(1), collections.Counter())
    with pytest.raises(AssertionError, match="result"):
        for _ in range(40):
            pair.step()


@pytest.mark.long
def test_changed_programs_are_refused_with_a_reason(tmp_path):
    done = fuzz(tmp_path, "pt2", "--runs", 10, "--seed", run_seed())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_finding_is_reported_and_kept(tmp_path):
    """An end without a reason is a finding; so the checks above can fail."""
    crashing = tmp_path / "crashing"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    (finding,) = ir.run_batch(str(crashing), [], ["module {}"])
    assert "exit status -11" in finding.what
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    (finding,) = ir.run_batch(str(silent), [], ["module {}"])
    assert finding.what == "refused without an error message"


def test_most_drawn_modules_are_valid():
    text = "// -----\n".join(modules.draw_module(random.Random(i)) for i in range(100))
    done = subprocess.run([BUILD / "bin/moe-opt", "--split-input-file"], input=text,
                          capture_output=True, text=True)
    assert done.stderr.count("error:") < 25, done.stderr
