"""All that a run does, in the order in which it does it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from . import machine

# Seconds of each group out of eight minutes; what one leaves over the next ones have.
SHARES = {"once": 110, "instructions": 40, "forms": 60, "large": 50, "times": 180, "sanitizer": 40}
BUDGET = sum(SHARES.values())
# A process with torch and a CUDA context; measured on no GPU, so rather too much.
START = 8.0


@dataclass(frozen=True)
class Group:
    name: str
    units: list
    # Of the whole run, when this group ends.
    deadline: float

    @property
    def model(self) -> float:
        return START + sum(unit.model for unit in self.units) if self.units else 0.0


def all_units(rehearses: bool) -> list:
    """Each has a `name`, its `group`, a `limit` and a `model` in seconds, and `run(target)`.

    Past the limit its process ends; the model is what it takes on a GPU, for the plan.
    """
    from . import capture, cases, faults, instructions, rows

    return [machine.Gpu(), *cases.all_cases(rehearses), *capture.all_captures(), *instructions.all_vectors(),
            *rows.all_units(rehearses), *faults.all_faults()]


def groups(rehearses: bool, seconds: float, names: Sequence[str] | None = None,
           text: str = "") -> list[Group]:
    """The units by group; `names` are groups, `text` is a part of the units' names."""
    units = all_units(rehearses)
    names = names or list(SHARES)
    if unknown := [name for name in names if name not in (*SHARES, "faults")]:
        raise SystemExit(f"expected groups among {', '.join((*SHARES, 'faults'))}, found "
                         f"{', '.join(unknown)}")
    scale = seconds / sum(SHARES.get(name, 60) for name in names)
    result, end = [], 0.0
    for name in names:
        end += scale * SHARES.get(name, 60)
        mine = [u for u in units if text in u.name
                and (u.name in machine.SANITIZED if name == "sanitizer" else u.group == name)]
        result.append(Group(name, mine, end))
    return result


def describe(groups: list[Group]) -> str:
    """The plan of a run: modelled seconds on a GPU, and when each group is ended at the latest."""
    lines = [f"{'group':14}{'cases':>6}{'model s':>9}{'ends by s':>11}"]
    lines += [f"{g.name:14}{len(g.units):6}{g.model:9.0f}{g.deadline:11.0f}" for g in groups]
    total = sum(g.model for g in groups)
    lines.append(f"{'all':14}{sum(len(g.units) for g in groups):6}{total:9.0f}"
                 f"{math.ceil(groups[-1].deadline):11}")
    return "\n".join(lines)
