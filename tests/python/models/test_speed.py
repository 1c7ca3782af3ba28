"""The measurement of models of real widths, on a model of small ones."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from moe_mlir_bench.models import page
from moe_mlir_bench.models.cpp_program import NAME as CPP
from moe_mlir_bench.models.cpp_program import PACKED, CppProgram
from moe_mlir_bench.models.near_ties import judge
from moe_mlir_bench.models.real_widths import build
from moe_mlir_bench.models.speed import WAYS, main, measure
from moe_mlir_bench.models.speed_page import Row, read_rows, summary, table
from moe_mlir_bench.models.ways import Weights

_SMALL = dict(hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
              num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=64)


def check(ways, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = measure("Granite-1B", "f32", prompt=5, steps=2, rounds=1, sizes=_SMALL, ways=ways)
    assert [row.way for row in rows] == list(ways)
    for row in rows:
        assert row.tokens == "eager's" and row.steps > 0 and row.first_token > 0, row
        assert row.memory is not None and not row.reason and (row.warm or row.way in (CPP, PACKED))
    assert table(rows).count("| eager's |") == len(ways)
    assert not list(tmp_path.glob("moe-mlir-*"))


def test_compiled_models_give_the_tokens_of_eager(tmp_path, monkeypatch):
    check(["eager, grouped_mm", "moe_mlir.compile, packed", PACKED], tmp_path, monkeypatch)


@pytest.mark.long
def test_every_way_gives_the_tokens_of_eager(tmp_path, monkeypatch):
    check(WAYS, tmp_path, monkeypatch)


def test_a_roomier_cache_is_another_row(capsys):
    ways = ["eager, grouped_mm", "moe_mlir.compile, packed"]
    rows = measure("Granite-1B", "f32", 5, 2, 1, _SMALL, ways, room=40)
    assert {row.model for row in rows} == {"Granite-1B, 1 layer, room for 40"}
    assert {row.tokens for row in rows} == {"eager's"}
    with pytest.raises(SystemExit):
        main(["Granite-1B", "--prompt", "5", "--steps", "2", "--room", "7"])
    assert "expected --room of at least 8, for the prompt" in capsys.readouterr().err


def test_a_way_that_fails_has_a_reason():
    """Of four experts nobody chooses five."""
    sizes = dict(_SMALL, num_experts_per_tok=5)
    for row in measure("Granite-1B", "f32", 5, 2, 1, sizes, ["eager, grouped_mm"]):
        assert row.steps is None and row.tokens == "no" and "Error" in row.reason
        assert row.reason in table([row])


def test_an_artifact_needs_a_compiler_and_room(tmp_path, monkeypatch):
    weights = Weights(build("Granite-1B", "f32", _SMALL), alone=True)
    program = CppProgram(CPP, weights, tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        with pytest.raises(FileNotFoundError, match=r"expected a C\+\+ compiler.*found none"):
            program.start(torch.ones(1, 3, dtype=torch.int64), 8)
    usage = type("", (), {"free": 1 << 20})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"expected 256 MB free in .*, found 1 MB"):
        program.start(torch.ones(1, 3, dtype=torch.int64), 8)


@torch.no_grad()
def test_other_tokens_are_near_ties_or_faults():
    """The best tokens of bf16 logits: one that is equal but for rounding, and a plain other."""
    model = build("Granite-1B", "bf16", _SMALL)
    prompt = torch.arange(3, 8)[None]
    logits = model(prompt).logits[0, -1]
    best = int(logits.argmax())
    near = (best + 1) % 64
    model.model.embed_tokens.weight[near] = model.model.embed_tokens.weight[best]
    model.model.embed_tokens.weight[near, 0] *= 1.0078125
    model.lm_head.weight = model.model.embed_tokens.weight
    expected = int(model(prompt).logits[0, -1].argmax())
    other = near if expected == best else best
    worst = int(logits.argmin())
    verdicts = judge(model, prompt, [expected], {"near": [other], "fault": [worst]})
    assert verdicts["near"].is_near_tie and not verdicts["fault"].is_near_tie
    assert str(verdicts["fault"]).startswith("from token 1 on the tokens are others than eager's")
    assert judge(model, prompt, [expected], {}) == {}


def test_rows_of_a_page_are_replaced_and_the_rest_stays(tmp_path):
    """The tables of docs/Models.md are measured apart."""
    rows = [Row("OLMoE", "bf16", "Inductor", 10.0, 2.0, 3.0, None, 0.5, "eager's",
                arguments=f"OLMoE --json {name}.json", machine=name) for name in ("one", "two")]
    measured, written = tmp_path / "r.json", tmp_path / "Models.md"
    measured.write_text(json.dumps([asdict(row) for row in rows]))
    page.write(written, page.FAMILIES, "The tiny ones.\n")
    for _ in range(2):
        assert main(["--read", str(measured), "--output", str(written)]) == 0
        sections = page.read(written)
        assert list(sections) == [page.REAL_WIDTHS, page.FAMILIES]
        assert sections[page.FAMILIES] == "The tiny ones.\n"
        for name in ("one", "two"):
            part = sections[page.REAL_WIDTHS].split(f"### {name}\n")[1].split("### ")[0]
            assert part.count("| OLMoE | bf16 | Inductor | 10.0 |") == 1
            assert part.count("`--speed OLMoE --json") == 1
            assert f"`--speed OLMoE --json {name}.json`" in part
    again = [Row("OLMoE", "bf16", "Inductor", 20.0, 4.0, 6.0, 1.0, 0.5, "near tie", note="why",
                 arguments="OLMoE --again", machine="two"),
             Row("OLMoE", "f32", "Inductor", reason="too large", arguments="OLMoE --again", machine="two")]
    measured.write_text(json.dumps([asdict(row) for row in again]))
    for _ in range(2):
        assert main(["--read", str(measured), "--output", str(written)]) == 0
        one, two = page.read(written)[page.REAL_WIDTHS].split("### one\n")[1].split("### two\n")
        assert "| OLMoE | bf16 | Inductor | 10.0 | 2.00 | 3.0 | no | +0.50 | eager's |" in one
        assert "| 20.0 | 4.00 | 6.0 | 1.0 | +0.50 | near tie |" in two and "10.0" not in two
        assert "| OLMoE | f32 | Inductor | no | no | no | no | no | no |" in two
        assert two.count("- OLMoE bf16, Inductor: why") == two.count("Inductor: too large") == 1
        assert two.count("`--speed OLMoE --again`") == two.count("`--speed OLMoE --json two.json`") == 1
    sections = page.read(written)
    page.write(written, page.FOLDERS, "All.\n")
    assert page.read(written) == {**sections, page.FOLDERS: "All.\n"}
    assert written.read_text().startswith("# Models\n")


def test_a_summary_has_the_fastest_way_of_each_side():
    rows = [Row("OLMoE", "bf16", way, prompt, steps) for way, prompt, steps in (
        ("eager, grouped_mm", 100.0, 10.0), ("Inductor", 90.0, 20.0), ("moe_mlir.compile", 200.0, 30.0),
        ("artifact in C++, packed", 150.0, 50.0), ("eager, moe", None, 15.0))]
    rows.append(Row("Gemma 4", "f32", "moe_mlir.compile", 7.0, 3.0))
    lines = summary("a CPU", rows).splitlines()
    assert lines[0] == "**a CPU**"
    assert lines[-2:] == [
        "| OLMoE | bf16 | 10.0 | 20.0 | 50.0 | 2.5x | 100 | 90 | 200 | 2.0x |",
        "| Gemma 4 | f32 |  |  | 3.0 |  |  |  | 7 |  |"]


def test_rows_are_read_from_the_page():
    pages = Path(__file__).resolve().parents[3] / "docs"
    machines = read_rows((pages / "Models.md").read_text())
    assert [len(rows) > 10 for rows in machines.values()] == [True, True]
    assert {row.model for rows in machines.values() for row in rows} > {"Granite-1B", "Qwen3-MoE"}
    assert read_rows("# Models\n") == {}
