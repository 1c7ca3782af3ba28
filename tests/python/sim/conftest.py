"""Options and the summary line of the simulator's tests."""

import sys
from pathlib import Path

import pytest

# The tests' own modules, and the package where it is not installed.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[3] / "python"))

FIGURES = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--sim-all-mutants",
        action="store_true",
        help="run every mutant of the simulator's corpus, not a sample",
    )


def pytest_configure(config):
    config.stash[FIGURES] = {}


@pytest.fixture(scope="session")
def figures(pytestconfig):
    """Figures for the summary, by name; printed in order of insertion."""
    return pytestconfig.stash[FIGURES]


def pytest_terminal_summary(terminalreporter, config):
    figures = config.stash[FIGURES]
    if figures:
        text = "; ".join(f"{name} {value}" for name, value in figures.items())
        terminalreporter.write_line(f"simulator: {text}")
