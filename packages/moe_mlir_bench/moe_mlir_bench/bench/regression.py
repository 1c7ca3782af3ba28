"""Whether ours fell behind its rivals since an earlier run.

Ratios are compared, not times: they survive a change of machine or of load far
better. Only rows that both runs have count.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Ratios of one build moved by up to a fifth between runs on a busy machine.
TOLERANCE = 0.25


def compare(
    records: Iterable[dict[str, Any]],
    path: str | Path,
    tolerance: float = TOLERANCE,
) -> list[str]:
    """A line for each row whose ratio fell by more than `tolerance`."""
    with open(path) as file:
        earlier = {_key(record): record for record in json.load(file)}
    lines = []
    for record in records:
        before = earlier.get(_key(record))
        if not before or not before.get("ratio") or not record["ratio"]:
            continue
        if record["ratio"] < (1 - tolerance) * before["ratio"]:
            lines.append(
                f"{record['title']}: expected a ratio of at least "
                f"{(1 - tolerance) * before['ratio']:.2f} (it was {before['ratio']:.2f}), "
                f"found {record['ratio']:.2f}"
            )
    return lines


def _key(record):
    return record["op"], json.dumps(record["shape"], sort_keys=True), record["dtype"], \
        record["threads"]
