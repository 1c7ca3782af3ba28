"""A short run of every target of utils/fuzz; `python utils/fuzz all --seconds 600` is a long one."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import run_seed
from support import BUILD

FUZZ = Path(__file__).resolve().parents[3] / "utils/fuzz"
sys.path.insert(0, str(FUZZ))

import ir  # noqa: E402
import modules  # noqa: E402

# The same inputs each run: what new ones find is the work of `python utils/fuzz`, not of a
# change that has nothing to do with it.
SEED = 1


def fuzz(tmp_path, *arguments):
    return subprocess.run(
        [sys.executable, FUZZ, *map(str, arguments), "--build", BUILD, "--compiler", BUILD,
         "--out", tmp_path], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("target, runs", [
    ("json", 5000), ("sizes", 5000), ("npy", 3000), ("weights", 3000), ("artifact", 300),
    ("ptx", 400), ("kernels", 60), ("ir", 80)])
def test_changed_inputs_are_refused_with_a_reason(tmp_path, target, runs):
    done = fuzz(tmp_path, target, "--runs", runs, "--seed", SEED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{runs} inputs" in done.stdout and "0 findings" in done.stdout


def compare_index_programs(seed, programs, calls):
    """In a process of its own, which a signal would end."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("index_programs.py"), *map(str, (
            seed, programs, calls))], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    refused = int(done.stdout.split()[2])
    assert 0 < refused < programs * calls


def test_compiled_programs_refuse_what_eager_refuses():
    compare_index_programs(run_seed(), 4, 200)


@pytest.mark.long
def test_many_compiled_programs_refuse_what_eager_refuses():
    compare_index_programs(run_seed(), 20, 5000)


@pytest.mark.long
def test_changed_programs_are_refused_with_a_reason(tmp_path):
    done = fuzz(tmp_path, "pt2", "--runs", 10, "--seed", SEED)
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
