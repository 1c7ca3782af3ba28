"""The time of a launch: the largest of its terms, each in seconds."""

import functools
import math
from dataclasses import dataclass

from . import chips, timeline


@dataclass(frozen=True)
class Launch:
    """One launch: its shape, and what an average block does."""

    name: str
    blocks: float
    threads: int
    resident: int  # blocks of it that an SM holds
    code: object
    lines: dict  # executions of each line of PTX by the warps of one block
    wavefronts: float  # of a block
    requests: float  # of shared memory, of a block
    sectors: float  # of global memory that the warps of a block touch
    loaded_bytes: float  # of a block
    stored_bytes: float
    cluster: int = 1  # blocks of one

    @property
    def l2_bytes(self) -> float:
        """Of a block. What a warp leaves of a sector, another load finds in L1."""
        return min(32 * self.sectors, self.loaded_bytes + self.stored_bytes)

    @property
    def warps(self) -> float:
        return self.threads / 32

    @functools.cached_property
    def counts(self) -> list:
        return timeline.executions(self.code, self.lines, self.warps)

    @functools.cached_property
    def traces(self):
        return timeline.traces_of(self.code, self.counts)

    def cycles(self, resident: int, load: float) -> float:
        """Of so many blocks that share an SM, with nothing else in their way."""
        conflicts = max(1.0, self.wavefronts / self.requests) if self.requests else 1.0
        return timeline.Scheduler(self.code, self.traces, resident, self.warps, load,
                                  conflicts).cycles()

    def pipe_cycles(self) -> dict:
        """Cycles of the SM that a block takes of each pipe."""
        cycles = {"issue": 0.0, "tensor": 0.0, "shared": self.wavefronts,
                  "L1": self.sectors * 32 / chips.L1_BYTES_A_CYCLE}
        for at, count in zip(self.code.instructions, self.counts):
            count *= self.warps
            cycles["issue"] += count / chips.SCHEDULERS
            pipe, cost = timeline.PIPE_OF.get(timeline.root(at.name), (None, 0))
            if pipe:
                cycles[pipe] = cycles.get(pipe, 0.0) + count * cost
            cycles["tensor"] += count * timeline.tensor_cycles(at)
            cycles["shared"] += count * timeline.operand_wavefronts(at)
        # What has one half of the pipe to itself takes turns with the rest of it.
        heavy = cycles.pop("fma heavy", 0.0)
        cycles["fma"] = max(heavy, cycles.get("fma", 0.0) + heavy / 2)
        return cycles


@dataclass(frozen=True)
class Estimate:
    """Seconds of a launch by term, and what it keeps in flight."""

    terms: dict
    bytes_in_flight: float  # an SM in use
    waves: float
    used_sms: int

    @property
    def seconds(self) -> float:
        return max(self.terms.values())

    @property
    def binding(self) -> str:
        return max(self.terms, key=self.terms.get)


def estimate(launch: Launch, chip, dram_bytes: float) -> Estimate:
    """`dram_bytes` of what the launch reads and writes are not in L2."""
    blocks = math.ceil(launch.blocks)
    sms = chip.reach(launch.cluster)
    busiest = math.ceil(blocks / sms)
    resident = max(1, min(launch.resident, busiest))
    loaded = launch.l2_bytes * blocks
    cold = min(1.0, dram_bytes / loaded) if loaded else 0.0
    load = chips.L2_LATENCY + cold * (chips.DRAM_LATENCY - chips.L2_LATENCY)
    terms = {f"{pipe}": busiest * cycles / chip.clock
             for pipe, cycles in launch.pipe_cycles().items()}
    terms["L2 of an SM"] = busiest * launch.l2_bytes / chip.l2_an_sm / chip.clock
    terms["L2"] = loaded / chip.l2
    terms["DRAM"] = dram_bytes / chip.dram
    # So many blocks at a time, and what is left over at the end.
    alone = launch.cycles(resident, load)
    cycles = busiest // resident * alone
    if busiest % resident:
        cycles += launch.cycles(busiest % resident, load)
    terms["dependences"] = cycles / chip.clock
    return Estimate(terms, resident * launch.loaded_bytes * min(1.0, load / alone),
                    blocks / (sms * launch.resident), min(blocks, sms))
