"""How long the warps of one scheduler take for what is resident on its SM at once.

The walk follows the machine code as the assembler has scheduled it: an instruction holds
its warp for the encoded stall cycles and waits for the scoreboards that it names; warps
take turns at the issue port, the pipes and the tensor core. How often each instruction
runs comes from the simulator, through the line of PTX it stems from. A loop is walked a
few times; its later passes stand for all others.
"""

import heapq
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field

from . import chips

# One instruction of PTX makes one of these: where the assembler has copied a loop's body,
# each copy runs so many times fewer.
_ONE_TO_ONE = ("HMMA", "LDG", "STG", "LDSM", "STSM", "LDS", "STS", "SHFL", "MUFU", "BAR",
               "LDGSTS", "RED", "ATOM", "REDUX", "UTMALDG")
_PASSES = 4

# Cycles of an SM that one warp instruction takes of each pipe: 32 lanes over the lanes a cycle.
PIPES = {
    "fma": (0.25, ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2")),
    # Integer products go through the half of the pipe that has multipliers.
    "fma heavy": (0.5, ("IMAD", "IDP")),
    "alu": (0.5, ("LOP3", "IADD3", "ISETP", "SEL", "PRMT", "SHF", "IMNMX", "VIMNMX", "VIMNMX3",
                  "FMNMX", "FSETP", "FSEL", "LEA", "PLOP3", "IABS", "HMNMX2", "HSETP2", "F2FP",
                  "BMSK", "SGXT", "FCHK", "P2R", "R2P", "VOTE", "IADD", "VIADD", "VHMNMX")),
    "xu": (2.0, ("MUFU", "POPC", "FLO", "BREV", "F2F", "F2I", "I2F", "I2FP")),
    "lsu": (1.0, ("LDS", "STS", "LDSM", "STSM", "LDG", "STG", "LDGSTS", "SHFL", "ATOMS", "ATOMG",
                  "ATOM", "RED", "LD", "ST", "LDL", "STL", "REDUX", "MATCH")),
}
PIPE_OF = {name: (pipe, cycles) for pipe, (cycles, names) in PIPES.items() for name in names}


def root(name: str) -> str:
    return name.split(".")[0]


def is_polling(loop) -> bool:
    """Does this short loop only ask an mbarrier again? Its passes depend on the schedule."""
    return len(loop) <= 12 and any("TRYWAIT" in i.name for i in loop)


def executions(code, lines: dict, warps: float) -> list:
    """How often an average warp runs each instruction.

    What ptxas has unrolled stands in several places, which share the count of their line.
    """
    blocks = list(basic_blocks(code.instructions))
    keys = [Counter((at.line, root(at.name)) for at in block if root(at.name) in _ONE_TO_ONE)
            for block in blocks]
    copies, homes = Counter(), Counter()
    for block, own in zip(blocks, keys):
        times = _copies_of_a_body(block, own)
        copies.update({key: times for key in own})
        homes.update({at.line for at in block})
    counts = []
    for block, own in zip(blocks, keys):
        # The assembler moves instructions between blocks and lines, yet few of each.
        places = sorted([copies[key] for key in own] or [homes[at.line] for at in block])
        shared = places[len(places) // 4]
        if not own and shared < 3:
            shared = 1  # a line in two blocks has been moved, not copied
        often = statistics.median(lines.get(at.line, 0) for at in block)
        counts += [often / warps / shared] * len(block)
    for first, last in code.loop_ranges():
        if is_polling(code.instructions[first : last + 1]):
            entered = counts[first - 1] if first else 1.0
            counts[first : last + 1] = [min(c, entered) for c in counts[first : last + 1]]
    return counts


def _copies_of_a_body(block, own: Counter) -> int:
    """How often one after the other a basic block has the body of a loop."""
    times = min(own.values(), default=1)
    alike = len(own) > 2 or len(block) >= times * len({at.line for at in block})
    return times if alike else 1


def basic_blocks(instructions):
    block = []
    for at in instructions:
        if at.labels and block:
            yield block
            block = []
        block.append(at)
        if at.target or at.name.startswith(("EXIT", "RET")):
            yield block
            block = []
    if block:
        yield block


def latency(name: str, load: float) -> float:
    """Cycles from issue to result; `load` is what a load from global memory takes."""
    kind = root(name)
    if kind in ("LDG", "LD", "ATOM", "ATOMG", "RED", "LDGSTS", "UTMALDG", "UBLKCP"):
        return load
    if kind in ("LDS", "LDSM", "STS", "STSM", "ATOMS", "LDL", "STL"):
        return chips.SHARED_LATENCY
    if name.startswith("MEMBAR"):
        return chips.BLOCK_FENCE_LATENCY if "CTA" in name else chips.FENCE_LATENCY
    if kind in ("ERRBAR", "CCTL"):
        return chips.FENCE_LATENCY
    if kind in ("HMMA", "IMMA", "QMMA"):
        return chips.MMA_LATENCY
    if kind in ("SHFL", "REDUX", "S2R", "S2UR", "LDC", "SYNCS", "R2UR"):
        return 24
    return 18  # MUFU, conversions, population counts


def tensor_cycles(at) -> float:
    """Cycles of the SM for which a warp's share of a matrix instruction holds its tensor cores."""
    if at.name.startswith("HGMMA"):
        columns, depth = map(int, re.search(r"HGMMA\.64x(\d+)x(\d+)", at.name).groups())
        rate = chips.TENSOR_RATE * (depth / 16 if depth < 16 else 1)
        return 64 * columns * depth / rate / 4 / chips.TENSOR_SUSTAINED
    if at.name.startswith("HMMA"):
        shape = re.search(r"HMMA\.(16816|1688|1684)", at.name)
        depth = {"16816": 16, "1688": 8, "1684": 4}[shape[1]]
        rate = chips.TENSOR_RATE / (2 if ".TF32" in at.name else 1)
        return 16 * 8 * depth / rate / chips.MMA_SYNC_SHARE
    return 0.0


def operand_wavefronts(at) -> float:
    """Cycles in which a warp's share of a wgmma reads its operands from shared memory."""
    if not at.name.startswith("HGMMA"):
        return 0.0
    columns = int(re.search(r"64x(\d+)x", at.name)[1])
    # The first operand is a register, or the tile of both is named by one descriptor.
    from_registers = not at.operands.split(",")[1].strip().startswith("gdesc")
    return ((0 if from_registers else 64 * 32) + columns * 32) / 128 / 4


@dataclass(frozen=True)
class Trace:
    """What a warp goes through: numbers of instructions, and marks around passes of loops.

    Warps that share their registers unevenly have different tasks, and a trace each; what waits
    at an mbarrier is taken to be there. Elsewhere a trace is the way of most warps, with the
    trips of an average one: the work of all together is right.
    """

    entries: tuple  # int, ("pass", loop) at the begin of each pass, ("end", loop, trips)
    left_out: float  # what an average warp issues in all, over what it issues on this way


def tasks(code, counts: list) -> list:
    """(share of the warps, how often one of them runs each instruction) of each task."""
    marks = {}
    for i, at in enumerate(code.instructions):
        if at.name.startswith("USETMAXREG"):
            marks.setdefault("DEALLOC" in at.name, i)  # the first of each kind
    shares = {mark: counts[mark] / max(1e-9, sum(counts[m] for m in marks.values()))
              for mark in marks.values()}
    if len(shares) != 2 or any(not 0 < share < 1 for share in shares.values()):
        return [(1.0, counts)]
    behind = {mark: code.reachable(mark) for mark in shares}
    found = []
    for mark, share in shares.items():
        own, others = behind[mark], set().union(*(behind[m] for m in behind if m != mark))
        found.append((share, [
            count if (i in own) == (i in others) else count / share if i in own else 0.0
            for i, count in enumerate(counts)]))
    return found


def traces_of(code, counts: list) -> list:
    """(share of the warps, their trace) of each task."""
    return [(share, trace_of(code, own)) for share, own in tasks(code, counts)]


def trace_of(code, counts: list) -> Trace:
    loops = {}
    for first, last in code.loop_ranges():
        loops[first] = max(last, loops.get(first, -1))
    entries = []

    def visit(i, end, entered, own) -> float:
        """Appends the entries of a range; returns the instructions of one way through it."""
        issued = 0.0
        while i < end:
            last = loops.get(i)
            if last is not None and last < end and (i, last) != own:
                trips = counts[last] / entered
                if trips >= 0.5:
                    passes = min(_PASSES, max(1, round(trips)))
                    for _ in range(passes):
                        entries.append(("pass", i))
                        each = visit(i, last + 1, trips * entered, (i, last))
                    entries.append(("end", i, trips))
                    issued += trips * each
                i = last + 1
                continue
            if counts[i] >= 0.5 * entered:
                entries.append(i)
                issued += 1
            i += 1
        return issued

    issued = visit(0, len(code.instructions), 1.0, None)
    # Ways that fewer than half of the warps take are not walked; their time is made up for.
    return Trace(tuple(entries), max(1.0, sum(counts) / max(1.0, issued)))


@dataclass
class _Warp:
    """One warp on its way."""

    number: int
    block: int
    trace: Trace
    at: int = 0  # the entry of the trace that is next
    time: float = 0.0
    ready: list = field(default_factory=lambda: [0.0] * 6)
    copied: float = 0.0  # when the asynchronous copies so far have arrived
    groups: list = field(default_factory=list)  # when each group of them has
    products: list = field(default_factory=list)  # when each group of products is done
    done: float = 0.0  # when the last of its products is
    marks: list = field(default_factory=list)  # (mark, time)
    barriers: int = 0

    def wait(self, groups: list, left: int) -> None:
        """Until all but the last `left` groups are there."""
        if len(groups) > left:
            self.time = max(self.time, groups[-1 - left])
            del groups[: len(groups) - left]


class Scheduler:
    """A quarter of an SM: an issue port, pipes, a tensor core, and warps that share them."""

    def __init__(self, code, traces: list, blocks: int, warps: float, load: float,
                 conflicts: float):
        self.code, self.load, self.conflicts = code, load, conflicts
        total = max(1, round(blocks * warps / chips.SCHEDULERS))
        each = max(1.0, warps / chips.SCHEDULERS)
        self.warps = [_Warp(i, int(i / each), _task_of(traces, i % each / each))
                      for i in range(total)]
        self.free = {"issue": 0.0, "tensor": 0.0}
        self.arrived = {}  # (block, how manieth barrier) -> warps that wait there

    def cycles(self) -> float:
        """Until the last warp is through."""
        queue = [(0.0, warp.number) for warp in self.warps]
        heapq.heapify(queue)
        while queue:
            _, number = heapq.heappop(queue)
            warp = self.warps[number]
            if not self._prepare(warp):
                continue
            if queue and queue[0][0] < warp.time:
                heapq.heappush(queue, (warp.time, number))  # it waits, another may go first
                continue
            at = self.code.instructions[warp.trace.entries[warp.at]]
            pipe, hold = self._pipe(at)
            start = max(warp.time, self.free["issue"], self.free.get(pipe, 0.0))
            if queue and start > warp.time and queue[0][0] < start:
                warp.time = start
                heapq.heappush(queue, (start, number))
                continue
            warp.time = start
            self.free["issue"] = start + 1
            if pipe:
                self.free[pipe] = start + hold
            for released in self._issue(warp, at):
                heapq.heappush(queue, (self.warps[released].time, released))
        return max(warp.trace.left_out * _whole_time(warp) for warp in self.warps)

    def _prepare(self, warp) -> bool:
        """Steps over marks and waits for scoreboards; False once the warp is through."""
        entries = warp.trace.entries
        while warp.at < len(entries) and isinstance(entries[warp.at], tuple):
            warp.marks.append((entries[warp.at], warp.time))
            warp.at += 1
        if warp.at == len(entries):
            return False
        at = self.code.instructions[entries[warp.at]]
        for barrier in at.waits:
            warp.time = max(warp.time, warp.ready[barrier])
        if root(at.name) == "DEPBAR" and (left := re.search(r"SB\d, 0x([0-9a-f]+)", at.operands)):
            warp.wait(warp.groups, int(left[1], 16))
        elif at.name.startswith("WARPGROUP.DEPBAR"):
            left = re.search(r"0x([0-9a-f]+)", at.operands)
            warp.wait(warp.products, int(left[1], 16) if left else 0)
        return True

    def _pipe(self, at):
        kind = root(at.name)
        if kind in ("HMMA", "HGMMA"):
            # Products queue in front of the tensor core; a warp's own wait below.
            return ("tensor", 4 * tensor_cycles(at)) if kind == "HMMA" else (None, 0.0)
        pipe, cycles = PIPE_OF.get(kind, (None, 0.0))
        if kind in ("LDS", "STS", "LDSM", "STSM"):
            cycles *= self.conflicts
        return ("fma" if pipe == "fma heavy" else pipe), chips.SCHEDULERS * cycles

    def _issue(self, warp, at) -> list:
        """Issues one instruction; returns the warps that may go on."""
        kind = root(at.name)
        going = [warp.number]
        if kind == "LDGSTS":
            warp.copied = max(warp.copied, warp.time + self.load)
        elif kind == "LDGDEPBAR":
            warp.groups.append(warp.copied)
        elif kind == "HGMMA":
            hold = max(4 * tensor_cycles(at), 4 * operand_wavefronts(at))
            self.free["tensor"] = max(self.free["tensor"], warp.time) + hold
            warp.done = self.free["tensor"]
            if "gsb0" in at.operands:
                warp.products.append(warp.done + chips.WGMMA_LATENCY)
        elif kind == "UCGABAR_WAIT":
            warp.time += chips.CLUSTER_BARRIER_LATENCY
        elif kind == "BAR" and "ARV" not in at.name and at.operands.strip() == "0x0":
            going = self._meet(warp)
        done = warp.time + latency(at.name, self.load)
        if at.barrier is not None and kind != "LDGDEPBAR":
            warp.ready[at.barrier] = done
        if at.source_barrier is not None:
            warp.ready[at.source_barrier] = max(warp.ready[at.source_barrier], warp.time + 12)
        for number in going:
            self.warps[number].time += at.stall
            self.warps[number].at += 1
        return going

    def _meet(self, warp) -> list:
        """All warps of the block meet; the last one lets them go."""
        key = (warp.block, warp.barriers)
        warp.barriers += 1
        here = self.arrived.setdefault(key, [])
        here.append(warp.number)
        if len(here) < sum(other.block == warp.block for other in self.warps):
            return []
        for number in here:
            self.warps[number].time = warp.time + chips.BARRIER_LATENCY
        return here


def _task_of(traces: list, place: float) -> Trace:
    """The trace of the warp at that share of its block's."""
    for share, trace in traces:
        if place < share - 1e-6:
            return trace
        place -= share
    return traces[-1][1]


def _whole_time(warp) -> float:
    """The time of the walk, and what the passes that were left out would have added."""
    added, i = 0.0, 0
    while i < len(warp.marks):
        i, more = _left_out(warp.marks, i)
        added += more
    return warp.time + added


def _left_out(marks, i):
    """Behind a loop whose first pass begins at mark `i`, and what is to be added for it."""
    (_, loop, *_), begin = marks[i]
    passes, added, inner = [], 0.0, 0.0
    while True:
        i += 1
        (kind, name, *trips), time = marks[i]
        while name != loop:
            i, more = _left_out(marks, i)
            inner += more
            (kind, name, *trips), time = marks[i]
        passes.append(time - begin + inner)
        added += inner
        begin, inner = time, 0.0
        if kind == "end":
            steady = passes[1:] or passes
            return i + 1, added + max(0.0, trips[0] - len(passes)) * sum(steady) / len(steady)
