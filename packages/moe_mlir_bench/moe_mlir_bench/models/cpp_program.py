"""The way of `--speed` without Python: an artifact in the C++ program examples/deploy/generate.cpp."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch

import moe_mlir
from moe_mlir._support.paths import PACKAGE

from .ways import Weights

NAME = "artifact in C++"
PACKED = "artifact in C++, packed"
_ROOT = Path(__file__).resolve().parents[4]
_SOURCE = _ROOT / "examples" / "deploy" / "generate.cpp"
# What the program says of a sequence on stderr.
_SEQUENCE = re.compile(r"prompt: \d+ tokens in [\d.]+ s \(CPU ([\d.]+) s\)(?:; "
                       r"steps: (\d+) tokens in [\d.]+ s \(CPU ([\d.]+) s\))?")
_FIRST_TOKEN = re.compile(r"first token after ([\d.]+) s")
_RESIDENT = re.compile(r"(\d+) MB resident")


class CppProgram:
    """As a `Way`: each run is a process of its own, whose first sequence warms it up."""

    has_prompt_of_its_own = True

    def __init__(self, name: str, weights: Weights, folder: Path, threads: int):
        self.name, self._weights, self._folder, self._threads = name, weights, folder, threads
        self.seconds: dict[str, list[float]] = {"prompt": [], "steps": []}
        self.tokens: list[int] = []
        self.note = ""
        self._resident = 0

    def start(self, ids: torch.Tensor, room: int) -> float:
        """Compiles what is not in the folder; returns the program's seconds to the first token."""
        artifact = self._folder / "decoder.artifact"
        if not artifact.exists():
            begin = time.perf_counter()
            _compile_program(self._folder)
            _save_decoder(self._weights.model, room, artifact, packed=self.name == PACKED)
            seconds = time.perf_counter() - begin
            self.note = f"save_decoder and g++ took {seconds:.0f} s before its first token"
        said = self._generate([ids], 0)
        found = _FIRST_TOKEN.search(said)
        if found is None:
            raise RuntimeError(f"expected the seconds to the first token, found {said!r}")
        return float(found[1])

    def run(self, ids: torch.Tensor, steps: int) -> None:
        said = self._generate([ids, ids], steps)
        _, (prompt, count, seconds) = _SEQUENCE.findall(said)
        self.seconds["prompt"].append(float(prompt))
        if steps:
            self.seconds["steps"].append(float(seconds) / int(count))

    def added(self, before: int, resident: int, size: int) -> float:
        """Its process holds the weights, too: those of them that it has read."""
        return (self._resident - size) / size

    def _generate(self, sequences, steps) -> str:
        """Runs the program; keeps the tokens of the last sequence, returns what it said."""
        arguments = [" ".join(map(str, ids[0].tolist())) for ids in sequences]
        command = [str(self._folder / "generate"), str(self._folder / "decoder.artifact"),
                   str(steps + 1), *" -- ".join(arguments).split()]
        done = _run(command, OMP_NUM_THREADS=str(self._threads))
        self.tokens = [int(token) for token in done.stdout.splitlines()[-1].split()]
        resident = _RESIDENT.search(done.stderr)
        self._resident = int(resident[1]) << 20 if resident else 0
        return done.stderr


def _run(command, **environment):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: "
                           f"{said[-1] if said else 'no message'}")
    return done


def _compile_program(folder: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("expected a C++ compiler, g++ or clang++, found none in PATH")
    if not _SOURCE.exists():
        raise FileNotFoundError("expected moe-mlir's source tree with examples/deploy/generate.cpp, "
                                "found an installed package")
    _run([compiler, "-std=c++20", "-O2", str(_SOURCE), "-I", str(_ROOT / "include"), "-L",
          str(PACKAGE), f"-Wl,-rpath,{PACKAGE}", "-lmoe_runtime", "-o", str(folder / "generate")])


def _save_decoder(model, room: int, artifact: Path, packed: bool) -> None:
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    needed, free = size + (1 << 28), shutil.disk_usage(artifact.parent).free
    if free < needed:
        raise OSError(f"expected {needed >> 20} MB free in {tempfile.gettempdir()} for the artifact "
                      f"of a model of {size >> 20} MB, found {free >> 20} MB")
    model.set_experts_implementation("grouped_mm")
    # A prompt and the steps after it.
    moe_mlir.save_decoder(model, artifact, room=room, later_prompts=False, pack=packed)
