"""The seed of a run: tests that draw examples draw new ones each run, and any run can be repeated.

`MOE_MLIR_SEED` is that seed. Where it is not set, a run draws one, prints it, and hands it to the
workers of pytest-xdist through the environment.
"""

import os
import random

import pytest

_VARIABLE = "MOE_MLIR_SEED"


def run_seed() -> int:
    """The seed of this run; drawn by the first process that asks."""
    text = os.environ.setdefault(_VARIABLE, str(random.SystemRandom().randrange(2**31)))
    try:
        return int(text)
    except ValueError:
        raise SystemExit(f"error: expected an integer in {_VARIABLE}, found {text!r}") from None


def some(cases, by=None):
    """Cases of which one, or one of each `by(case)`, always runs; the run's seed draws them.

    The others are long, so that a run and a long run of one seed run all of them.
    """
    groups = {}
    for case in (cases := list(cases)):
        groups.setdefault(by(case) if by else None, []).append(case)
    draw = random.Random(run_seed())
    drawn = [draw.choice(group) for group in groups.values()]
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)),
                         marks=() if case in drawn else pytest.mark.long) for case in cases]


def draw_cases(config, items):
    """Of functions with the mark `drawn(n)` n cases, drawn by the run's seed; the rest is long.

    Functions of equal cases with a mark `drawn(n, like=NAME)` draw the same ones, for which they
    share what is dear to build.
    Whoever names a test or a part of names means those, all of them.
    """
    if config.getoption("keyword", None) or any("::" in argument for argument in config.args):
        return
    functions = {}
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is not None and item.get_closest_marker("long") is None:
            name = item.nodeid.partition("[")[0]
            like = mark.kwargs.get("like", name)
            functions.setdefault((name, like, mark.args[0]), []).append(item)
    for (_, like, count), cases in functions.items():
        draw = random.Random(f"{run_seed()} {like}")
        drawn = set(map(id, draw.sample(cases, min(count, len(cases)))))
        for case in cases:
            if id(case) not in drawn:
                case.add_marker(pytest.mark.long)


def configure_hypothesis(config):
    """Draws by the seed of the run; nothing in a property test depends on the clock."""
    import hypothesis

    hypothesis.settings.register_profile(
        "moe", derandomize=False, print_blob=True, deadline=None, database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("moe")
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = run_seed()
