"""What `./test --quick` runs of pytest: as many test functions as fit into its time.

One parametrisation of each function, drawn by the run's seed. How long a function takes was
measured by the last whole run of this user (utils/run_tests.py writes it down beside the caches);
the cheapest come first, what was never measured counts as average.
"""

import json
import random
import signal
import time
from pathlib import Path

import pytest
import seeds

WORKERS = 2
_UNKNOWN = 0.5  # seconds


def add_options(parser):
    parser.addoption("--quick-seconds", type=float, metavar="SECONDS",
                     help="run one parametrisation of the cheap tests, for about so long")
    parser.addoption("--quick-until", type=float, metavar="TIME",
                     help="skip what has not ended at this time, in seconds since 1970")
    parser.addoption("--quick-times", type=Path, metavar="JSON",
                     help="seconds of each test function, as the last whole run measured them")


def function_of(path, name):
    """`file::function`, by which times are kept; the path is from the root of the tree."""
    return f"{path}::{name.partition('[')[0]}"


def choose(functions, times, seconds):
    """Of {function: [test, ..]} one test each, the cheapest functions first, of so many seconds."""
    draw = random.Random(seeds.run_seed())
    names = list(functions)
    draw.shuffle(names)
    names.sort(key=lambda name: times.get(name, _UNKNOWN))
    chosen, total = [], 0.0
    for name in names:
        total += times.get(name, _UNKNOWN)
        if total > seconds:
            break
        chosen.append(draw.choice(functions[name]))
    return chosen


def select(config, items):
    seconds = config.getoption("quick_seconds")
    if seconds is None:
        return
    functions = {}
    for item in items:
        functions.setdefault(function_of(item.location[0], item.name), []).append(item)
    file = config.getoption("quick_times")
    times = json.loads(file.read_text()) if file and file.exists() else {}
    chosen = set(map(id, choose(functions, times, seconds * WORKERS)))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def start_clock(config):
    """Skips the test that is to begin if the time is over, and wherever it is when it becomes so."""
    until = config.getoption("quick_until")
    if until is None:
        return
    signal.signal(signal.SIGALRM, _skip)
    if time.time() >= until:
        _skip()
    signal.setitimer(signal.ITIMER_REAL, until - time.time())


def stop_clock(config):
    if config.getoption("quick_until") is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _skip(*_):
    pytest.skip("a quick run had no time for it")
