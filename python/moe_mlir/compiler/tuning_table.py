"""The numbers of kernels that `moe tune` measured on this machine.

Environment: MOE_MLIR_TUNING names the table, instead of `tuning.json` in the
folder of the disk cache; "off": the modelled numbers. A table is read once a
process.
"""

import functools
import json
import os
import sys
import warnings
from pathlib import Path

from .._native import native
from .._support.files import read_regular
from .cache import default_folder, read_own_file, require_private

FORMAT = "moe_mlir_tuning"


def table_path() -> Path | None:
    """Where the table is, or would be; None where it is off."""
    named = os.environ.get("MOE_MLIR_TUNING")
    if named == "off":
        return None
    return Path(named) if named else default_folder() / "tuning.json"


def read_cpus(path: Path) -> dict[str, dict]:
    """The entries of a table that is to be written; none of a missing or an unsound one.

    Raises:
        ValueError: the file is no table, and must not be replaced.
    """
    try:
        table = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _no_table(path, error) from None
    if not isinstance(table, dict) or FORMAT not in table:
        raise _no_table(path, f'no object with "{FORMAT}"')
    try:
        native().cpu_pipeline("native", json.dumps(table))
        return dict(table["cpus"])
    except (ValueError, TypeError, KeyError) as error:
        print(f"{path} is no sound table and is replaced: {error}", file=sys.stderr)
        return {}


def _no_table(path, reason) -> ValueError:
    return ValueError(f"expected {path} to be free or a table of moe tune, found "
                      f"another file: {reason}; remove it, or let MOE_MLIR_TUNING name another")


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
            raise ValueError(f"MOE_MLIR_TUNING: {problem}; moe tune writes a table, "
                             "MOE_MLIR_TUNING=off goes without one") from None
        warnings.warn(f"{problem}; kernels have the modelled numbers, until python -m "
                      "moe_mlir.cli.tune writes a new table", RuntimeWarning, stacklevel=3)
        return native().cpu_pipeline(cpu)


def _read(path, is_named):
    if path is None or not (is_named or path.exists()):
        return ""
    if is_named:
        return read_regular(path).decode()
    # As for the code beside it: whoever could write there could choose what runs.
    require_private(path.parent)
    return read_own_file(path).decode()
