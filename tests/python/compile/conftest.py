"""What tests of compiled models share."""

import pytest

from moe_mlir.compiled.program import CompiledProgram


@pytest.fixture
def searches(monkeypatch):
    """The calls that looked for a program."""
    seen = []
    fit = CompiledProgram.fit

    def spy(self, values):
        seen.append(values)
        return fit(self, values)

    monkeypatch.setattr(CompiledProgram, "fit", spy)
    return seen
