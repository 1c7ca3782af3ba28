"""Machine code as nvdisasm prints it: instructions, loops, what one block occupies."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moe_mlir.compiler.chips import chips

# Of an SM: registers, threads, blocks (and bytes of shared memory that a block reserves).
SM_REGISTERS, SM_THREADS, SM_BLOCKS, BLOCK_RESERVES = 65536, 2048, 32, 1024


def find_tool(name: str) -> str:
    found = os.environ.get(name.upper()) or shutil.which(name)
    for folder in sys.path:
        wheel = Path(folder) / "nvidia" / "cu13" / "bin" / name
        if not found and wheel.exists():
            found = str(wheel)
    if not found:
        raise FileNotFoundError(f"expected {name} in PATH or in a wheel, found none")
    return found


@dataclass(frozen=True)
class Instruction:
    """One instruction and what the assembler has encoded beside it."""

    name: str
    operands: str
    labels: tuple  # in front of it
    target: str | None  # the label it branches to
    line: int  # of the PTX it comes from
    control: int  # of the encoding: stall cycles, barriers set, barriers waited for
    guarded: bool = False  # by a predicate

    @property
    def stall(self) -> int:
        """Cycles until the warp may issue its next instruction."""
        return max(1, self.control & 15)

    @property
    def barrier(self) -> int | None:
        """The scoreboard that the result is announced on."""
        number = self.control >> 5 & 7
        return None if number == 7 else number

    @property
    def source_barrier(self) -> int | None:
        """The scoreboard that says when the operands have been read."""
        number = self.control >> 8 & 7
        return None if number == 7 else number

    @property
    def waits(self) -> tuple:
        """The scoreboards that it waits for."""
        mask = self.control >> 11 & 63
        return tuple(i for i in range(6) if mask >> i & 1)


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel."""

    instructions: tuple
    registers: int
    spilled: int
    static_shared: int

    @property
    def mnemonics(self):
        return [i.name for i in self.instructions]

    def loop_ranges(self):
        """Pairs (first, last) of instructions, from a backward branch's target to the branch."""
        place = {label: i for i, at in enumerate(self.instructions) for label in at.labels}
        for i, at in enumerate(self.instructions):
            if at.target in place and place[at.target] <= i and not self._returns_from_wait(i):
                yield place[at.target], i

    def _returns_from_wait(self, i: int) -> bool:
        """Is this the way back from where a warp asks an mbarrier again? That code stands apart."""
        before = self.instructions[max(0, i - 2) : i]
        return (not self.instructions[i].guarded and len(before) == 2
                and "TRYWAIT" in before[0].name and before[1].target is not None)

    def reachable(self, start: int) -> set:
        """The instructions that a warp may come to behind this one."""
        place = {label: i for i, at in enumerate(self.instructions) for label in at.labels}
        seen, ahead = set(), [start]
        while ahead:
            i = ahead.pop()
            if i in seen or i >= len(self.instructions):
                continue
            seen.add(i)
            at = self.instructions[i]
            if at.target in place:
                ahead.append(place[at.target])
            if at.guarded or not at.name.startswith(("BRA", "EXIT", "RET")):
                ahead.append(i + 1)
        return seen

    def loops(self):
        for first, last in self.loop_ranges():
            yield self.mnemonics[first : last + 1]

    @property
    def matrix_instruction(self) -> str:
        """Of whole warpgroups where it has any, else of warps."""
        return "HGMMA" if any(m.startswith("HGMMA") for m in self.mnemonics) else "HMMA"

    def densest_loop(self, prefix: str):
        """The loop with the largest share of instructions of this name, and the share."""
        shares = [(sum(m.startswith(prefix) for m in loop) / len(loop), len(loop))
                  for loop in self.loops()]
        return max(shares, default=(0.0, 0))

    def describe_loop(self, prefix: str) -> str:
        share, length = self.densest_loop(prefix)
        return f"{100 * share:.0f} % of {length}" if length else "-"

    def blocks_an_sm(self, threads: int, dynamic_shared: int, chip: str) -> int:
        # Registers are given to warps in units of 8 a thread.
        registers = -(-self.registers // 8) * 8 * threads
        shared = self.static_shared + dynamic_shared + BLOCK_RESERVES
        available = chips()[chip].shared_bytes + BLOCK_RESERVES  # one block may have all of it
        return min(SM_BLOCKS, SM_THREADS // threads, SM_REGISTERS // registers,
                   available // shared)


@lru_cache(maxsize=256)
def assemble(ptx: str, chip: str, name: str) -> Code:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        log = subprocess.run(
            [find_tool("ptxas"), f"-arch={chip}", "-lineinfo", "-v", str(source), "-o",
             str(cubin)],
            capture_output=True, text=True, check=True,
        ).stderr
        listing = subprocess.run(
            [find_tool("nvdisasm"), "-c", "-gp", "-hex", str(cubin)],
            capture_output=True, text=True, check=True,
        ).stdout
    return Code(read_listing(listing, name), *read_log(log, name))


def read_log(log: str, name: str):
    """Registers, spilled bytes and static shared memory of one kernel."""
    part = log.split(f"entry function '{name}'")[1].split("entry function")[0]
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
    shared = re.search(r"(\d+) bytes smem", part)
    return (int(re.search(r"Used (\d+) registers", part)[1]), spilled,
            int(shared[1]) if shared else 0)


_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)\s*([^;]*);")
_ENCODING = re.compile(r"/\* 0x([0-9a-f]{16}) \*/\s*$")
_LINE = re.compile(r'"\.nv_debug_ptx_txt[^"]*", line (\d+)')


def read_listing(listing: str, name: str) -> tuple:
    """The instructions of one kernel, without what pads it and functions that it calls."""
    part = listing.split(f".text.{name}:", 1)[1].split("//-----", 1)[0].split("\t.type", 1)[0]
    found, labels, line, pending = [], [], 0, None
    for text in part.splitlines():
        if label := re.match(r"(\.L_\w+):", text.strip()):
            labels.append(label[1])
        elif at := _LINE.search(text):
            line = int(at[1])
        elif at := _INSTRUCTION.search(text):
            target = re.search(r"`\((\.L_\w+)\)", at[3])
            pending = (at[2], at[3], tuple(labels), target[1] if target else None, line)
            guarded = at[1] is not None
            labels = []
        elif pending and (at := _ENCODING.search(text)):
            # The upper half of 128 bits; what steers the issue lies in bits 105 to 121.
            found.append(Instruction(*pending, int(at[1], 16) >> 41, guarded))
            pending = None
    place = {label: i for i, at in enumerate(found) for label in at.labels}
    last = max(i for i, at in enumerate(found) if at.name.startswith("EXIT"))
    # A loop may end behind the last exit. So do retries of waits, which are no loops of
    # their own, and a branch to itself, which pads the code.
    for i in range(last + 1, len(found)):
        if "TRYWAIT" in found[i].name:
            break
        if place.get(found[i].target, i) < i:
            last = i
    return tuple(found[: last + 1])


def spread(lines: dict, ptx: str) -> dict:
    """Counts by line of PTX, for all lines of a statement what the first of them has."""
    spread, first = {}, None
    for number, text in enumerate(ptx.splitlines(), 1):
        code = text.split("//")[0].strip()
        if not code:
            continue
        first = first or number
        if first in lines:
            spread[number] = lines[first]
        if code[-1] in ";{}:":
            first = None
    return spread
