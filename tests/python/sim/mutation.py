"""Runs mutants in worker processes: one that hangs or crashes is contained.

A corpus is a module with CASES: correct kernels with `name`, `kernel`, `text`, `sizes`, `load(text)`
and `launch(seed, policy, data=, module=, threads=)`, as corpus_case.py has them.
"""

import importlib
import multiprocessing
import threading
from collections import deque
from dataclasses import dataclass

from mutate import mutants

from moe_mlir import sim

SEEDS = 3
POLICIES = (0, 1)
SECONDS = 120  # a deadlock takes half a second to be sure of


@dataclass(frozen=True)
class Outcome:
    """`how` is a finding's kind, "value", or None for a mutant that passed;
    "hang", "crash" and "invalid" are faults of the test or the simulator."""

    case: str
    key: str
    line: int
    before: str
    after: str
    how: str | None
    detail: str = ""

    @property
    def name(self):
        return f"{self.case}:{self.key}"


def judge(case, mutant):
    """How the mutant is caught, and the message."""
    try:
        module = case.load(mutant.text)
    except sim.PtxError as error:
        return "invalid", str(error)
    for seed in range(max(SEEDS, len(case.sizes))):
        for policy in POLICIES:
            report, _, wrong = case.launch(
                seed, policy, data=seed, module=module, threads=1
            )
            if not report.ok:
                return report.findings[0].kind, report.findings[0].message
            if wrong:
                return "value", f"outputs {wrong} are wrong"
    return None, ""


def work(pipe, corpus):
    cases, texts = importlib.import_module(corpus).CASES, {}
    for index, key in iter(pipe.recv, None):
        case = cases[index]
        if index not in texts:
            texts[index] = {m.key: m for m in mutants(case.text, case.kernel)}
        pipe.send(judge(case, texts[index][key]))


class Worker:
    def __init__(self, corpus):
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=work, args=(end, corpus), daemon=True)
        self.process.start()
        end.close()

    def run(self, job):
        """(how, detail), or None if this worker is of no more use."""
        self.pipe.send(job)
        if not self.pipe.poll(SECONDS):
            self.process.kill()
            return "hang", f"no result after {SECONDS} s"
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return "crash", f"exit code {self.process.exitcode}"

    def close(self):
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join()


def run_mutants(jobs, workers=2, corpus="corpus"):
    """Outcomes of (case index, mutant) pairs, in the order of the pairs."""
    cases = importlib.import_module(corpus).CASES
    queue = deque(enumerate(jobs))
    outcomes = [None] * len(jobs)

    def serve():
        worker = None
        while True:
            try:
                at, (index, m) = queue.popleft()
            except IndexError:
                break
            worker = worker or Worker(corpus)
            how, detail = worker.run((index, m.key))
            outcomes[at] = Outcome(cases[index].name, m.key, m.line, m.before,
                                   m.after.strip(), how, detail)
            if how in ("hang", "crash"):
                worker.close()
                worker = None
        if worker:
            worker.close()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def all_jobs(corpus="corpus"):
    return [
        (index, m)
        for index, case in enumerate(importlib.import_module(corpus).CASES)
        for m in mutants(case.text, case.kernel)
    ]
