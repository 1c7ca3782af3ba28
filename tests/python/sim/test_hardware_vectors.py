"""What GPUs answered to instructions on chosen operands, which the simulator must answer, too.

The files come from `python -m moe_mlir_bench.gpu_check fixtures REPORT` (docs/Testing.md); an H100 wrote
these. That a file is read and judged is tested in tests/python/gpu/test_gpu_check.py.
"""

from pathlib import Path

from moe_mlir_bench.gpu_check.vectors import replay

FOLDER = Path(__file__).with_name("hardware")


def test_simulator_answers_as_hardware_does():
    problems = {path.stem: replay(path) for path in sorted(FOLDER.glob("*.npz"))}
    assert not {name: problem for name, problem in problems.items() if problem}
