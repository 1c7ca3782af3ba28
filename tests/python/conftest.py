"""What holds for every test: the seed of a run, the examples of hypothesis, what is imported.

What tests of several folders share is in `support.py`, importable from all of them.
"""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Two workers, each with a thread for each core: threads that wait for one another in a loop, as
# OpenMP's do by default, keep from the cores those that they wait for. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A test of what a trace does traces. Programs of traces on disk: models/test_stored_traces.py.
os.environ.setdefault("MOE_MLIR_CACHE_TRACES", "0")

import costs  # noqa: E402
import quick  # noqa: E402
import seeds  # noqa: E402


def pytest_addoption(parser):
    quick.add_options(parser)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config, items):
    seeds.draw_cases(config, items)
    quick.select(config, items)


def pytest_collection_finish():
    """Tracing makes objects by the million, a tenth of its time goes into looking for cycles.

    What the imports made stays; of the rest cycles are looked for less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    # First, as the clock skips a test that it leaves no time for.
    costs.begin(item)
    quick.start_clock(item.config)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    quick.stop_clock(item.config)
    costs.end(item)
    torch = sys.modules.get("torch")  # tests of this file's own parts run without it
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)  # for those that follow
        raise AssertionError("expected gradients enabled after a test, found them disabled")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    seeds.configure_hypothesis(config)


def pytest_report_header(config):
    return f"seed: {seeds.run_seed()} (MOE_MLIR_SEED repeats it)"


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(
            f"seed: MOE_MLIR_SEED={seeds.run_seed()} draws the same examples again")


@pytest.fixture
def compiled_texts(monkeypatch):
    """The texts of kernels that are compiled, or loaded from the disk, from here on."""
    from moe_mlir.compiler import jit

    texts = []
    load = jit.load_or_compile
    monkeypatch.setattr(jit, "load_or_compile", lambda *a: texts.append(a[0]) or load(*a))
    monkeypatch.setattr(jit, "_loaded", type(jit._loaded)())
    return texts
