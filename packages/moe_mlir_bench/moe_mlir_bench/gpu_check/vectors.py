"""Instructions on chosen operands: what hardware answers, beside what the simulator does.

Each `Vectors` is one kernel of PTX and the words that it reads. Its words and the
hardware's results go to instructions/NAME.npz of the report. `replay` runs such a file in
the simulator, so that it becomes a fixture: tests/python/sim/test_hardware_vectors.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from moe_mlir import sim

from .case import Problem
from .target import Target

_LANES = 128


@dataclass(frozen=True)
class Vectors:
    """`inputs` are arrays of 32-bit words, `out` is the shape of the result.

    The result may differ from the simulator's by `relative` of it and by `absolute`; where
    both are 0 it may not differ in a bit, but for which NaN it is. `magnitude` has the
    inputs whose result is what `relative` refers to instead: of sums, without signs.
    """

    name: str
    ptx: str
    inputs: tuple
    out: tuple
    grid: int = 1
    format: str = "f32"
    relative: float = 0.0
    absolute: float = 0.0
    magnitude: tuple | None = None
    # What it must be, whatever the simulator says.
    expected: np.ndarray | None = None
    chip: str = "sm_80"
    group: str = "instructions"
    limit: float = 15.0
    model: float = 0.2

    def run(self, target: Target) -> dict:
        import torch

        if not target.can_run(self.chip):
            return {"not_run": f"needs {self.chip}"}
        with target.active():
            buffers = [torch.from_numpy(x.view(np.int32).copy()).to(target.torch_device)
                       for x in self.inputs]
            out = torch.full(self.out, 0x7FC0DEAD, dtype=torch.int32, device=target.torch_device)
            target.run_ptx(self.ptx, "k", [*buffers, out], grid=(self.grid,), block=_LANES)
            target.synchronize()
            words = out.cpu().numpy().view(np.uint32)
        text, facts = self.compare(words)
        arrays = self.arrays(words)
        if text:
            raise Problem(text, arrays)
        return {"simulator": facts, "vectors": arrays}

    def arrays(self, words: np.ndarray) -> dict:
        """All that `replay` needs."""
        return {
            "ptx": np.array(self.ptx), "grid": np.array(self.grid), "format": np.array(self.format),
            "bounds": np.array([self.relative, self.absolute]), "words": words,
            **{f"input_{i}": x for i, x in enumerate(self.inputs)},
            **{f"magnitude_{i}": x for i, x in enumerate(self.magnitude or ())},
        }

    def compare(self, words: np.ndarray) -> tuple[str, dict[str, float]]:
        """What is wrong with hardware's words, and how they differ from the simulator's."""
        simulated = simulate(self.ptx, self.inputs, self.out, self.grid)
        text, facts = difference(words, simulated, self.format, self.relative, self.absolute,
                                 self._magnitude())
        if not text and self.expected is not None:
            wrong = int((words.view(np.float32) != self.expected).sum())
            text = f"{wrong} of {words.size} results differ from the exact ones" if wrong else ""
        return text, facts

    def _magnitude(self):
        if self.magnitude is None:
            return None
        return simulate(self.ptx, self.magnitude, self.out, self.grid).view(np.float32)


def simulate(ptx: str, inputs: Sequence[np.ndarray], out: tuple[int, ...], grid: int,
             numerics: Literal["exact", "tensor_core"] = "exact") -> np.ndarray:
    words: np.ndarray = np.full(out, 0x7FC0DEAD, np.uint32)
    sim.launch(ptx, "k", grid, _LANES, [*inputs, words], numerics=numerics)
    return words


def replay(path: Path) -> str:
    """Runs a file of vectors in the simulator; what differs by more than its bounds, or ""."""
    with np.load(path) as file:
        arrays = dict(file)

    def numbered(stem):
        count = sum(name.startswith(stem) for name in arrays)
        return [arrays[f"{stem}{i}"] for i in range(count)]

    ptx, grid, words = str(arrays["ptx"]), int(arrays["grid"]), arrays["words"]
    signless = numbered("magnitude_")
    magnitude: np.ndarray | None = None
    if signless:
        magnitude = simulate(ptx, signless, words.shape, grid).view(np.float32)
    found = simulate(ptx, numbered("input_"), words.shape, grid)
    relative, absolute = arrays["bounds"]
    return difference(words, found, str(arrays["format"]), relative, absolute, magnitude)[0]


def difference(words: np.ndarray, simulated: np.ndarray, form: str, relative: float,
               absolute: float,
               magnitude: np.ndarray | None = None) -> tuple[str, dict[str, float]]:
    """(what exceeds the bounds, counts and the largest distance in units of the last place)."""
    differs = words != simulated
    if form != "words":
        a, b = (_values(x, form) for x in (words, simulated))
        differs = _repeated(differs, a.size // words.size) & ~(np.isnan(a) & np.isnan(b))
    facts: dict[str, float] = {"differ": int(differs.sum()), "of": int(differs.size)}
    if form != "words" and differs.any():
        facts["ulps"] = _ulps(a, b)
    if not differs.any():
        return "", facts
    if form == "words" or not (relative or absolute):
        return f"{facts['differ']} of {facts['of']} results are not the simulator's", facts
    with np.errstate(all="ignore"):
        scale = np.abs(b) if magnitude is None else magnitude.astype(np.float64)
        error = np.where(a == b, 0, np.abs(a - b))
        wrong = ~(error <= relative * scale + absolute) & differs
    if not wrong.any():
        return "", facts
    at = int(np.argmax(wrong))
    return (f"{int(wrong.sum())} of {facts['of']} results are further from the simulator's than "
            f"{relative:.2g} of it and {absolute:.2g}; at {at} {a.flat[at]!r} for {b.flat[at]!r}",
            facts)


def _repeated(differs, times):
    return np.repeat(differs.ravel(), times) if times > 1 else differs


def _values(words, form):
    """Words as numbers in float64: f32, or pairs of f16 or bf16."""
    words = np.ascontiguousarray(words)
    if form == "f32":
        values = words.view(np.float32)
    elif form == "f16":
        values = words.ravel().view(np.uint16).view(np.float16)
    else:
        values = (words.ravel().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)


def _ulps(a, b) -> float:
    """The largest distance of finite f32 values, in units of the last place of b."""
    finite = np.isfinite(a) & np.isfinite(b)
    unit = np.spacing(np.abs(b[finite]).astype(np.float32)).astype(np.float64)
    return float((np.abs(a[finite] - b[finite]) / unit).max(initial=0))
