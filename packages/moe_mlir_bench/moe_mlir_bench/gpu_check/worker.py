"""The process that runs cases: a name a line in, a line of JSON out.

An illegal address spoils the GPU for the whole process, and a wrong barrier never ends, so
cases run in a process that `supervise` can end.
"""

import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from moe_mlir._support import files

from .target import Target

# Bytes of arrays that failing cases leave, in all.
_MAX_SAVED = 64 << 20


def serve(target: Target, folder: Path) -> int:
    """Runs what is asked for until the input ends."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from . import catalogue

    units = {unit.name: unit for unit in catalogue.all_units(target.rehearses)}
    if target.device == "cuda":
        import torch

        torch.zeros(1, device="cuda")
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        answer = run_unit(units[line.rstrip("\n")], target, folder)
        print(json.dumps(answer), file=answers)
        if answer.get("spoilt"):
            answers.flush()
            os._exit(1)  # destructors would wait for the GPU
    return 0


def run_unit(unit: Any, target: Target, folder: Path) -> dict:
    from .case import Problem

    start = time.monotonic()
    answer = {"case": unit.name, "group": unit.group, "problem": ""}
    try:
        facts = unit.run(target)
        if arrays := facts.pop("vectors", None):
            answer["vectors"] = _save(folder / "instructions", unit.name, arrays)
        answer |= facts
    except Problem as problem:
        answer["problem"] = str(problem)
        answer["arrays"] = _save(folder / "failures", unit.name, problem.arrays)
    except Exception as error:
        answer["problem"] = f"{type(error).__name__}: {error}"
        answer["traceback"] = traceback.format_exc()
    answer["seconds"] = round(time.monotonic() - start, 3)
    if answer["problem"] and not _is_usable(target):
        answer["spoilt"] = True
    return answer


def _is_usable(target) -> bool:
    try:
        target.synchronize()
    except Exception:
        return False
    return True


def _save(folder: Path, name: str, arrays: dict) -> str | None:
    """The file with the arrays, as a path in the report; None where there is no room left."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    used = sum(file.stat().st_size for file in folder.iterdir())
    if not arrays or used + sum(a.nbytes for a in arrays.values()) > _MAX_SAVED:
        return None
    path = folder / (re.sub(r"[^\w.]+", "_", name) + ".npz")
    with files.replacing(path, "wb") as file:
        np.savez_compressed(file, **arrays)
    return f"{folder.name}/{path.name}"
