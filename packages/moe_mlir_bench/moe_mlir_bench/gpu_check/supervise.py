"""Runs groups of cases in processes of their own, and writes a line about each case.

A case that fails costs its line. One that spoils its process, ends it, or does not end,
costs the process, too: the next case begins in a new one.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_START_LIMIT = 90.0
# How often no process may come up before the run is given up.
_MAX_FAILED_STARTS = 3
_LATE = {"problem": "", "not_run": "the time of its group is over"}


class Report:
    """report.jsonl of a folder: a line of JSON as soon as it is known, on the disk when written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.lines: list[dict] = []
        self._file = open(_free_place(folder), "x", encoding="utf-8")

    def add(self, **line: Any) -> None:
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if line.get("problem"):
            print(f"FAILED {line['case']}: {first_line(line['problem'])}", flush=True)

    def cases(self) -> list[dict]:
        return [line for line in self.lines if "case" in line]


def _free_place(folder: Path) -> Path:
    """report.jsonl of the folder, free: an earlier one gets the first free number."""
    path, number = folder / "report.jsonl", 1
    while (earlier := folder / f"report-{number}.jsonl").exists():
        number += 1
    if path.exists():
        path.rename(earlier)
    return path


class Worker:
    """A process that runs cases, by `worker.serve`."""

    def __init__(self, arguments: Sequence[str], folder: Path, prefix: Sequence[str] = (),
                 environment: Mapping[str, str] | None = None) -> None:
        self._log = open(folder / "worker.log", "ab")
        self._log_begin = self._log.tell()
        self._folder = folder
        self._pending = b""
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-u", "-m", "moe_mlir_bench.gpu_check", "worker", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env={**os.environ, **(environment or {})}, start_new_session=True)
        assert self._process.stdin and self._process.stdout  # pipes, as asked for
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def wait_until_ready(self, limit: float) -> dict:
        return self._read(limit)

    def run(self, name: str, limit: float) -> dict:
        try:
            self._questions.write(name.encode() + b"\n")
            self._questions.flush()
        except BrokenPipeError:
            pass  # why it ended is said where the answer is missing
        return self._read(limit)

    def _read(self, limit: float) -> dict:
        end = time.monotonic() + limit
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                self.kill()
                return {"problem": f"did not end within {limit:.3g} s and was killed",
                        "spoilt": True, "is_late": True}
            data = os.read(self._answers.fileno(), 1 << 16)
            if not data:
                return {"problem": self._describe_end(), "spoilt": True}
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _describe_end(self) -> str:
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        with open(self._folder / "worker.log", "rb") as log:
            log.seek(self._log_begin)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with {how}" + (f": {lines[-1]}" if lines else "")

    def kill(self) -> None:
        """Ends the process and what it started; a GPU may hold it for a while."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        self._log.close()

    def finish(self, limit: float) -> int | None:
        """Lets the process end by itself; its status, or None if it had to be killed."""
        try:
            self._questions.close()
            return self._process.wait(limit)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()
            return None
        finally:
            self._log.close()


class Supervisor:
    """Runs groups; `arguments` are those of the worker's command."""

    def __init__(self, report: Report, arguments: Sequence[str]) -> None:
        self._report = report
        self._arguments = arguments
        self._start = time.monotonic()
        self._failed_starts = 0
        self._worker: Any = None

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def run_group(self, group: Any, worker_options: Mapping[str, Any] | None = None) -> None:
        """Starts no case and waits for none after the group's deadline."""
        begin, self._worker = self.elapsed, None
        try:
            for unit in group.units:
                self._run_unit(group, unit, worker_options or {})
        except BaseException:
            if self._worker:
                self._worker.kill()
            raise
        if self._worker:
            self._worker.finish(max(10.0, group.deadline - self.elapsed))
        self._summarise(group, self.elapsed - begin)

    def _run_unit(self, group, unit, worker_options):
        answer = self._reason_to_leave_out(group)
        if answer is None and self._worker is None:
            self._worker, answer = self._start_worker(group, worker_options)
        if answer is None:
            answer = self._limited(group, unit.limit, lambda limit: self._worker.run(unit.name, limit))
        if answer.pop("spoilt", False) and self._worker:
            self._worker.kill()
            self._worker = None
        self._report.add(**{"case": unit.name, "group": group.name, **answer})

    def _reason_to_leave_out(self, group):
        if self.elapsed >= group.deadline:
            return dict(_LATE)
        if self._failed_starts >= _MAX_FAILED_STARTS:
            return {"problem": "", "not_run": "no process comes up"}
        return None

    def _limited(self, group, limit, ask) -> dict:
        """The answer within the limit; what the group's end cuts short is no fault."""
        left = group.deadline - self.elapsed
        answer = ask(max(0.0, min(limit, left)))
        if answer.pop("is_late", False) and left < limit:
            return {**_LATE, "spoilt": True}
        return answer

    def _start_worker(self, group, options):
        """(worker, None) or (None, what is told of the case)."""
        worker = Worker(self._arguments, self._report.folder, **options)
        answer = self._limited(group, _START_LIMIT, worker.wait_until_ready)
        if answer.get("ready"):
            self._failed_starts = 0
            return worker, None
        worker.kill()
        if "not_run" not in answer:
            self._failed_starts += 1
            answer["problem"] = f"no process for cases: {answer['problem']}"
        return None, answer

    def _summarise(self, group, seconds):
        mine = [line for line in self._report.cases() if line["group"] == group.name]
        print(f"{group.name}: {summary(mine)} in {seconds:.0f} s "
              f"({self.elapsed:.0f} of {group.deadline:.0f} s)", flush=True)


def summary(lines: Sequence[dict[str, Any]]) -> str:
    failed = sum(bool(line["problem"]) for line in lines)
    left_out = sum("not_run" in line for line in lines)
    text = f"{len(lines) - failed - left_out} cases passed, {failed} failed"
    return text + (f", {left_out} not run" if left_out else "")


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else text
