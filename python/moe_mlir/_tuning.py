"""The numbers of kernels that `python -m moe_mlir.tune` measured on this machine.

Environment: MOE_MLIR_TUNING names the table, instead of `tuning.json` in the
folder of the disk cache; "off": the modelled numbers. A table is read once a
process.
"""

import functools
import os
import warnings
from pathlib import Path

from ._native import native
from .cache import default_folder

FORMAT = "moe_mlir_tuning"


def table_path() -> Path | None:
    """Where the table is, or would be; None where it is off."""
    named = os.environ.get("MOE_MLIR_TUNING")
    if named == "off":
        return None
    return Path(named) if named else default_folder() / "tuning.json"


def cpu_pipeline(cpu: str) -> str:
    """The passes of "moe-to-cpu" with the numbers for `cpu`: modelled, or measured where a table
    has them."""
    return _cpu_pipeline(cpu, table_path(), bool(os.environ.get("MOE_MLIR_TUNING")))


@functools.cache
def _cpu_pipeline(cpu, path, is_named):
    try:
        return native().cpu_pipeline(cpu, _read(path, is_named))
    except (OSError, UnicodeDecodeError, native().MoeError) as error:
        problem = f"cannot use {path}: {error}"
        if is_named:
            raise ValueError(f"MOE_MLIR_TUNING: {problem}; python -m moe_mlir.tune writes a table, "
                             "MOE_MLIR_TUNING=off goes without one") from None
        warnings.warn(f"{problem}; kernels have the modelled numbers, until python -m "
                      "moe_mlir.tune writes a new table", RuntimeWarning, stacklevel=3)
        return native().cpu_pipeline(cpu)


def _read(path, is_named):
    if path is None or not (is_named or path.exists()):
        return ""
    return path.read_text()
