"""The measurement of models of real widths, on a model of small ones."""

import json
from dataclasses import asdict

import pytest
import torch

from moe_mlir.frontends.dynamo import register
from moe_mlir.models import page
from moe_mlir.models.speed import WAYS, Row, main, measure, table

_SMALL = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
              num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=64)


@torch.no_grad()
def check(ways):
    rows = measure("Granite-1B", "f32", prompt=5, steps=2, rounds=1, sizes=_SMALL, ways=ways)
    assert [row.way for row in rows] == list(ways)
    for row in rows:
        assert row.agrees and row.steps > 0 and row.first_token > 0, row
    assert table(rows).count("eager's") == len(ways)


def test_a_compiled_model_gives_the_tokens_of_eager():
    check(["eager, grouped_mm", "eager, batched_mm", "moe_mlir.compile"])


@pytest.mark.long
def test_every_way_gives_the_tokens_of_eager():
    register()
    check(WAYS)


def test_the_section_of_a_page_is_replaced_and_the_rest_stays(tmp_path):
    """The tables of docs/Models.md are measured apart."""
    rows = [Row("OLMoE", "bf16", "Inductor", 10.0, 2.0, 3.0, 0.5, True, arguments="OLMoE --json r.json")]
    measured, written = tmp_path / "r.json", tmp_path / "Models.md"
    measured.write_text(json.dumps([asdict(row) for row in rows]))
    written.write_text("# Models\n\nThe tiny ones.\n")
    for _ in range(2):
        assert main(["--read", str(measured), "--output", str(written)]) == 0
        front, section = page.read(written)
        assert front == "# Models\n\nThe tiny ones.\n"
        assert section.count("| OLMoE | bf16 | Inductor | 10.0 |") == 1
        assert "`--speed OLMoE --json r.json`" in section
    page.write(written, "# Models\n", page.read(written)[1])
    assert page.read(written) == ("# Models\n", section)
