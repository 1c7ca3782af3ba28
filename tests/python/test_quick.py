"""What a quick run takes: one case of each function, the cheap ones first, by its time."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick import choose

HERE = Path(__file__).parent
FUNCTIONS = {"cheap": ["cheap[a]", "cheap[b]"], "new": ["new"], "dear": ["dear[a]"]}
CASES = """
import pytest
@pytest.mark.parametrize("x", range(9))
def test_cases(x): pass
def test_dear(): pass
"""
TIMES = {"cheap": 0.1, "dear": 30.0}


@pytest.mark.parametrize("seconds, names", [(0.2, {"cheap"}), (1, {"cheap", "new"}),
                                            (40, {"cheap", "new", "dear"})])
def test_the_cheap_come_first_with_one_case_each(seconds, names):
    chosen = choose(FUNCTIONS, TIMES, seconds)
    assert len(chosen) == len(names) and {test.partition("[")[0] for test in chosen} == names


def run(folder, *arguments, code=CASES):
    for name in ("conftest.py", "costs.py", "seeds.py", "quick.py"):
        (folder / name).write_text((HERE / name).read_text())
    (folder / "test_it.py").write_text(code)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                           f"--rootdir={folder}", *arguments, "test_it.py"],
                          cwd=folder, capture_output=True, text=True).stdout


def test_a_run_takes_one_case_and_leaves_out_what_was_measured_as_dear(tmp_path):
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"test_it.py::test_dear": 100.0, "test_it.py::test_cases": 0.01}))
    shown = run(tmp_path, "--quick-seconds=1", f"--quick-times={times}")
    assert "1 passed, 9 deselected in" in shown


def test_a_test_that_is_running_when_the_time_is_over_is_skipped(tmp_path):
    shown = run(tmp_path, "--quick-seconds=9", f"--quick-until={time.time() + 6}",
                code="import time\ndef test_dear(): time.sleep(60)\n")
    assert "1 skipped in" in shown


def test_what_the_clock_leaves_no_time_for_is_shown_as_skipped(tmp_path):
    shown = run(tmp_path, "--quick-seconds=9", f"--quick-until={time.time() - 1}")
    assert "2 skipped, 8 deselected in" in shown
