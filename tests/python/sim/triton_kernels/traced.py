"""Proofs, from what a launch does to shared memory, that it does not need a barrier.

The race check plays no part in them. Without a barrier, what lies between the barriers that are left
is one epoch. Where every two conflicting accesses of two threads are in two epochs still, the barrier
orders nothing in shared memory that others do not. A copy by cp.async and the reads of a wgmma last
until the wait for them; for wgmma, a store needs a proxy fence, of its own thread before the barrier
or of the reader's behind it. What a warp has loaded and shuffled since, it may overwrite.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

STATEMENT, READ = 0, 1  # SharedEvent.kind
ALL_LANES = (1 << 32) - 1
NEVER = (1 << 30, 1 << 30)
KNOWN = re.compile(r"bar\.sync\s+0|cp\.async\.(ca|cg)\.|cp\.async\.(commit_group|wait_group|wait_all)"
                   r"|wgmma\.(fence|commit_group|wait_group|mma_async)"
                   r"|fence\.proxy\.async(\.shared::cta)?$|bar\.warp\.sync|shfl")


@dataclass(eq=False)
class Access:
    """An access and its epochs: [0] with all barriers, [1] without the ones in question."""

    thread: tuple
    is_write: bool
    is_wgmma: bool
    first: tuple
    #: Its place in the trace, and the place of the shuffle that has taken all that it loaded.
    place: int
    #: The last epochs for other threads' plain accesses, and for their wgmmas.
    last: tuple
    fenced: tuple
    #: The epochs of its thread's last proxy fence before it.
    fence: tuple
    shuffled: int = 1 << 30


class Warp:
    """Follows one warp through a trace."""

    def __init__(self):
        self.epoch, self.fence, self.stores, self.loaded = (0, 0), (0, 0), [], {}
        self.groups = {"cp.async": [[]], "wgmma": [[]]}  # The last one is open.

    def access(self, event, code, place):
        kind = next((k for k in self.groups if code.startswith(k)), None)
        is_write = event.kind != READ
        made = Access((event.warp, event.lane), is_write, kind == "wgmma", self.epoch,
                      place, NEVER if kind else self.epoch, NEVER if kind or is_write else self.epoch,
                      self.fence)
        if kind:
            self.groups[kind][-1].append(made)
        elif is_write:
            self.stores.append(made)
        elif code.startswith("ld"):
            operands = code.split(None, 1)[1].split("[")[0]
            self.load(made, event.line, re.findall(r"[%\w]+", operands))
        return made

    def load(self, made, line, registers):
        """Each register belongs to the last statement that loads it; its lanes come in a row."""
        known = self.loaded.get(registers[0])
        if not known or known[0] != line or known[3] != made.place - len(known[2]):
            known = line, set(registers), [], made.place
            self.loaded.update(dict.fromkeys(registers, known))
        known[2].append(made)

    def shuffle(self, code, place):
        """Every lane waits here for what every lane has loaded."""
        shuffled = re.match(r"shfl\.sync\.\w+\.b32\s+[^,]+,\s*(%?\w+),.*,\s*-1$", code)
        if shuffled and shuffled[1] in self.loaded:
            _, left, loads, _ = self.loaded[shuffled[1]]
            left.discard(shuffled[1])
            for made in loads if not left else ():
                made.shuffled = min(made.shuffled, place)

    def statement(self, code, is_deleted, place):
        if code.startswith("bar.sync"):
            self.epoch = self.epoch[0] + 1, self.epoch[1] + (not is_deleted)
        elif code.startswith("shfl"):
            self.shuffle(code, place)
        elif code.startswith("fence.proxy"):
            self.fence = self.epoch
            for made in self.stores:
                made.fenced = self.epoch
            self.stores.clear()
        elif "commit_group" in code:
            self.groups[code.split(".commit")[0]].append([])
        elif wait := re.match(r"(cp\.async|wgmma)\.wait_(group|all)\D*(\d*)", code):
            self.wait(self.groups[wait[1]], wait[2] == "all", int(wait[3] or 0))

    def wait(self, groups, for_all, left):
        for group in groups[:] if for_all else groups[:len(groups) - 1 - left]:
            for made in group:
                made.last = self.epoch
                if made.is_wgmma:
                    made.fenced = self.epoch
                elif made.is_write:
                    self.stores.append(made)
            group.clear()


def code_of(text, line):
    code = text.split("\n")[line - 1].split("//")[0].strip().lstrip("{ \t").rstrip(";} \t")
    return re.sub(r"^@!?%?\w+\s+", "", code)


def keeps_order(text, line, trace):
    """Whether shared memory needs none of the barriers that the line executes."""
    codes = {event.line: code_of(text, event.line) for event in trace}
    if not all(KNOWN.match(codes[event.line]) for event in trace if event.kind == STATEMENT):
        return False
    warps, cells = defaultdict(Warp), defaultdict(list)
    for place, event in enumerate(trace):
        warp = warps[event.block, event.warp]
        if event.kind == STATEMENT:
            warp.statement(codes[event.line], event.line == line, place)
        else:
            made = warp.access(event, codes[event.line], place)
            for at in range(event.offset, event.offset + event.bytes):
                cells[event.block, at].append(made)
    return not any(loses_order(write, other) for accesses in cells.values()
                   for write in accesses if write.is_write for other in accesses)


def waits_of_all(text, traces):
    """The lines at which all threads of a block wait for the phase of an mbarrier, or none do."""
    partial, full = set(), set()
    for trace in traces:
        everyone = {(event.block, event.warp) for event in trace}
        waiting = defaultdict(set)
        for event in trace:
            if event.kind == STATEMENT and "mbarrier.try_wait" in code_of(text, event.line):
                waiting[event.line, event.block].add(event.warp)
                if event.offset != ALL_LANES:
                    partial.add(event.line)
        for (line, block), warps in waiting.items():
            is_full = warps == {warp for b, warp in everyone if b == block}
            (full if is_full else partial).add(line)
    return full - partial


def loses_order(write, other):
    """Whether two accesses to one byte conflict, and only with the barriers are in two epochs."""
    if write is other or write.thread == other.thread and not other.is_wgmma:
        return False
    if write.thread[0] == other.thread[0] and other.place < other.shuffled < write.place:
        return False
    return are_apart(write, other, 0) and not are_apart(write, other, 1)


def are_apart(write, other, way):
    if other.last[way] < write.first[way]:
        return True
    if other.is_wgmma:
        return write.fenced[way] < other.first[way] or write.last[way] < other.fence[way]
    return write.last[way] < other.first[way]
