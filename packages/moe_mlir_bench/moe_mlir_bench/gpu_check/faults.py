"""Kernels that fail on purpose, each followed by one that does not: `run --groups=faults`.

They prove, in the simulator or on a GPU, that a fault costs one line of the report and that
the cases behind it run.
"""

import os
from typing import Any, NoReturn

import numpy as np

from .ptx import kernel
from .target import Target
from .vectors import Vectors

_ONE: tuple[np.ndarray] = (np.arange(128, dtype=np.uint32),)
_BODIES = {
    # For a word that nobody writes; the simulator sees that nothing changes.
    "waits for ever": ".reg .pred %p;\nLOOP: ld.volatile.global.b32 r0, [%at];\n"
                      "setp.ne.u32 %p, r0, 12345;\n@%p bra LOOP;",
    "runs for ever": ".reg .b64 %l; .reg .pred %p;\nmov.b64 %l, 0;\nLOOP: add.u64 %l, %l, 1;\n"
                     "cvt.u32.u64 r0, %l;\nst.volatile.global.b32 [%at], r0;\n"
                     "setp.ne.u64 %p, %l, 0;\n@%p bra LOOP;",
    "writes out of bounds": "add.u64 %at, %at, 0x10000000000;\nst.global.b32 [%at], v0_0;\n"
                            "mov.b32 r0, v0_0;",
    "computes wrongly": "add.u32 r0, v0_0, 2;",
    "fails to load": "no.such.instruction r0, v0_0;",
}


class Death:
    """The process ends, as by a fault of the driver's or of ours."""

    name, group, limit, model = "kills its process", "faults", 10.0, 1.0

    def run(self, target: Target) -> NoReturn:
        os.abort()


def all_faults() -> list:
    units: list[Any] = []
    right: np.ndarray = np.arange(1, 129, dtype=np.uint32).view(np.float32)
    for name, body in _BODIES.items():
        units += [_fault(name, body, right), _sound(len(units))]
    return [*units, Death(), _sound(len(units))]


def _fault(name, body, expected):
    # What is over by itself has time even on a busy machine: its line says why it failed. A GPU
    # does not see that nothing changes, and takes the whole limit for both that do not end.
    limit = 2.0 if name == "runs for ever" else 15.0
    return Vectors(name, kernel([1], 1, body), _ONE, (128,), format="words", expected=expected,
                   group="faults", limit=limit, model=limit if name.endswith("for ever") else 2.0)


def _sound(number):
    return Vectors(f"sound {number}", kernel([1], 1, "add.u32 r0, v0_0, 1;"), _ONE, (128,),
                   format="words", group="faults")
