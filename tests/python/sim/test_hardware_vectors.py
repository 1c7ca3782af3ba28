"""What GPUs answered to instructions on chosen operands, which the simulator must answer, too.

The files come from `python -m moe_mlir_bench.gpu_check fixtures REPORT` (docs/Testing.md); an H100 wrote
these. That a file is read and judged is tested in tests/python/gpu/test_gpu_check.py.
"""

from pathlib import Path

import numpy as np
import pytest

from moe_mlir_bench.gpu_check.vectors import replay, simulate

FOLDER = Path(__file__).with_name("hardware")


def test_simulator_answers_as_hardware_does():
    problems = {path.stem: replay(path) for path in sorted(FOLDER.glob("*.npz"))}
    assert not {name: problem for name, problem in problems.items() if problem}


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("mma_*.npz"))])
def test_sums_of_tensor_cores_have_the_same_bits(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        inputs = [file[f"input_{i}"] for i in range(3)]
        ptx, grid, words = str(file["ptx"]), int(file["grid"]), file["words"]
    found = simulate(ptx, inputs, words.shape, grid, numerics="tensor_core")
    assert (found == words).all()
    assert (simulate(ptx, inputs, words.shape, grid) != words).any(), "operands that show no order"
