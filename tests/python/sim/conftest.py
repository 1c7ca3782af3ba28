"""The summary line of the simulator's tests."""

import sys
from pathlib import Path

# The tests' own modules, and the package where it is not installed.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[3] / "python"))


def pytest_terminal_summary(terminalreporter):
    # utils/run_tests.py prints the same from the JUnit report: where workers
    # share the tests, this file is loaded by them alone.
    from figures import summary

    reports = terminalreporter.stats.values()
    line = summary(
        pair
        for report in (r for group in reports for r in group)
        if getattr(report, "when", "") == "call"
        for pair in report.user_properties
    )
    if line:
        terminalreporter.write_line(line)
