"""What test files cost, from a run of pytest with workers to the lines that `./test` prints."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import costs

HERE = Path(__file__).parent
CONFTEST = """
import pytest, costs
def pytest_runtest_setup(item): costs.begin(item)
@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item): costs.end(item)
"""
DEAR = """
import subprocess, sys, time
LOOP = "import time; end = time.process_time() + 0.4\\nwhile time.process_time() < end: pass"
def test_here(): exec(LOOP)
def test_in_a_child(): subprocess.run([sys.executable, "-c", LOOP], check=True)
"""
SLOW = "import time\ndef test_waits(): time.sleep(0.5)\n"


def test_work_is_counted_in_children_too_and_waiting_is_not(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dear.py").write_text(DEAR)
    (tmp_path / "test_slow.py").write_text(SLOW)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2",
         "-o", "junit_family=xunit1", "--junitxml=report.xml", f"--rootdir={tmp_path}"],
        cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(HERE)})
    seconds = costs.of_files(ElementTree.parse(tmp_path / "report.xml").iter("testcase"))
    assert seconds["test_dear.py"] > 0.7 > 0.4 > seconds["test_slow.py"]
    first, second, third = costs.summary(seconds).splitlines()
    assert first.startswith("CPU seconds of the dearest test files, of ")
    assert second.endswith("%  test_dear.py") and third.endswith("%  test_slow.py")


def test_only_the_dearest_are_named_and_nothing_of_nothing():
    seconds = Counter({f"test_{i}.py": float(i) for i in range(1, 15)})
    lines = costs.summary(seconds).splitlines()
    assert len(lines) == 11 and lines[1].split() == ["14.0", "13.3", "%", "test_14.py"]
    assert costs.summary(Counter()) == ""


def test_a_file_beyond_its_budget_is_named():
    seconds = Counter({f"test_{i}.py": 5.0 for i in range(19)}, **{"test_dear.py": 19.0})
    (line,) = costs.over_budget(seconds)
    assert line.startswith("test_dear.py: expected at most 10% of the suite's CPU seconds, found 17%")
    assert costs.over_budget(Counter()) == []
