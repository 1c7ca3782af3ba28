import pytest

pytest.importorskip(
    "transformers", reason="transformers 5 is not installed (pip install --no-deps transformers)")
