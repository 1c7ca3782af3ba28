"""A few of torch's operators in each run, by torch's own samples; all of them in a long one."""

import pytest
from seeds import run_seed
from test_fuzz import run_program


@pytest.mark.parametrize("operators", [8, pytest.param(1000, marks=pytest.mark.long)])
def test_operators_compute_what_eager_computes_or_are_refused(operators):
    samples, _, refused, _ = run_program("torch_operators.py", run_seed(), operators, 3).split()
    assert int(samples) > 0 and int(refused) <= int(samples)
