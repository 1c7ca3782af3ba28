"""What each test file costs in CPU seconds, children included: `./test` prints the dearest.

Seconds of a clock would also count what other processes of a busy machine take.
"""

import contextlib
import os
import resource
from collections import Counter
from pathlib import Path

PROPERTY = "cpu_seconds"
# Children that do the work of many tests, and whose own count only when they have ended.
_SERVERS: list[int] = []
_TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(pid: int):
    """Counts a child while it works for tests, with its own children that have ended."""
    _SERVERS.append(pid)
    try:
        yield
    finally:
        _SERVERS.remove(pid)


def _of_server(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has been waited for, and counts among the children
    return sum(map(int, fields[11:15])) / _TICKS


def cpu_seconds() -> float:
    """Of this process, of its children that have ended, and of those that serve it."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used) + sum(map(_of_server, _SERVERS))


def begin(item) -> None:
    item.cpu_began = cpu_seconds()


def end(item) -> None:
    """Records what the item took so far, with its fixtures; reports of a test have it."""
    item.user_properties.append((PROPERTY, f"{cpu_seconds() - item.cpu_began:.3f}"))


def of_files(cases) -> Counter:
    """CPU seconds by file, of the test cases of a JUnit report."""
    seconds = Counter()
    for case in cases:
        for item in case.iter("property"):
            if item.get("name") == PROPERTY:
                seconds[case.get("file")] += float(item.get("value"))
    return seconds


# The share of all CPU seconds that one file may take of a whole run.
BUDGET = 0.1


def over_budget(seconds: Counter) -> list[str]:
    """A sentence for each file that takes more than its share of a whole run."""
    total = sum(seconds.values())
    return [f"{name}: expected at most {BUDGET:.0%} of the suite's CPU seconds, found "
            f"{value / total:.0%}; draw some of its cases with pytest.mark.drawn, or share what "
            "they build" for name, value in seconds.most_common() if value > BUDGET * total]


def summary(seconds: Counter, most: int = 10) -> str:
    """The dearest files, one a line, with their share; empty if nothing was measured."""
    total = sum(seconds.values())
    if not total:
        return ""
    lines = [f"CPU seconds of the dearest test files, of {total:.0f} in all:"]
    lines += [f"  {value:6.1f}  {100 * value / total:4.1f} %  {name}"
              for name, value in seconds.most_common(most)]
    return "\n".join(lines)
