"""NVIDIA's chips, as include/MoE/Support/Chips.h lists them, and what runs on which."""

import functools
import json
import re
from dataclasses import dataclass

from .._native import native
from .._support.paths import PACKAGE

# The same table, where a folder of packed kernels has no compiler beside it.
PACKED_TABLE = "chips.json"


@dataclass(frozen=True)
class Chip:
    """What MoE/Support/Chips.h says of a chip; `is_target`: kernels can be compiled for it."""

    name: str
    is_target: bool
    shared_bytes: int
    cluster_blocks: int
    has_wgmma: bool

    @property
    def number(self) -> int:
        return int(re.sub(r"\D", "", self.name))

    @property
    def runs_alone(self) -> bool:
        """Whether its PTX runs there and nowhere else, as the letter of sm_90a says."""
        return self.name[-1].isalpha()


@functools.cache
def chips() -> dict[str, Chip]:
    """All chips by name, in the order in which PTX moves up."""
    packed = PACKAGE / PACKED_TABLE
    text = packed.read_text() if packed.exists() else native().known_chips()
    return {row["name"]: Chip(**row) for row in json.loads(text)}


def target_chips() -> tuple[str, ...]:
    """The chips that kernels can be compiled for."""
    return tuple(chip.name for chip in chips().values() if chip.is_target)


def runnable_chips(chip: str) -> tuple[str, ...]:
    """The targets whose PTX runs on a chip, the best first.

    >>> runnable_chips("sm_90a")
    ('sm_90a', 'sm_90', 'sm_89', 'sm_86', 'sm_80')
    """
    if chip not in target_chips():
        return (chip,)
    number = chips()[chip].number
    return tuple(name for name in reversed(target_chips())
                 if name == chip or (not chips()[name].runs_alone
                                     and chips()[name].number <= number))


def own_chip(number: int) -> str | None:
    """The target of the GPUs of that number: the one with the instructions that they alone have,
    or else the newest one whose PTX they run.

    >>> own_chip(90), own_chip(87)
    ('sm_90a', 'sm_86')
    """
    fitting = [name for name in target_chips()
               if chips()[name].number == number
               or (chips()[name].number < number and not chips()[name].runs_alone)]
    return fitting[-1] if fitting else None
