"""Small models of the folders of transformers that have experts: patched, compiled whole, decoded, trained."""

import pytest
import torch

from moe_mlir_bench.models import folders
from moe_mlir_bench.models.tiny_models import build

# Folders whose parts all work, each kind of cache and of router among them.
WORKING = ["afmoe", "aria", "bailing_hybrid", "cohere2_moe", "exaone_moe", "gemma4", "gpt_oss",
           "granitemoehybrid", "hy_v3", "inkling2", "jetmoe", "kimi_linear", "kolibri1", "lfm2_moe", "mellum",
           "mimo_v2_flash", "minimax_m3_vl", "nemotron_h", "olmoe", "qwen3_5_moe", "qwen3_next", "zaya"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("folder", WORKING)
def test_a_folder_works(folder):
    found = folders.check(folder)
    assert all(text.endswith(", ok") for text in found.values()), found


def test_what_does_not_work_has_its_reason_below_the_table():
    text = folders.table({
        "b": dict(patched="2 of 2, ok", whole="3e-07, ok", decoded="TypeError: a|b",
                  artifact="2e-07, ok", backend="2, ok"),
        "a": dict(patched="0 of 2", whole="1e-01, wrong", decoded="1e-07, ok", artifact="3e-07, ok",
                  backend="1, ok")})
    rows, reasons = text.split("\n\n")
    assert rows.splitlines()[2:] == ["| a | no | no | 1e-07 | 3e-07 | 1 |",
                                     "| b | 2 of 2 | 3e-07 | no | 2e-07 | 2 |"]
    assert reasons.splitlines() == ["- a, patched: 0 of 2", "- a, whole: 1e-01, wrong",
                                    "- b, decoded: TypeError: a/b"]


def test_another_version_is_told_by_what_is_short():
    newer = {"a": dict.fromkeys(folders.PARTS, "1 of 1, ok"), "b": {"patched": "0 of 2", "whole": "1e-06, ok"},
             "c": dict.fromkeys(folders.PARTS, "1 of 1, ok")}
    older = {"a": {**newer["a"], "decoded": "Error: a | b"}, "b": {"patched": "0 of 2", "whole": "1e-06, ok"}}
    text = folders.describe_beside("5.0", older, newer)
    assert "transformers 5.0, which has 2 of these folders, each column holds for all of them but:" in text
    assert "\n- patched: b\n- whole: none\n- decoded: a (Error: a / b), b\n" in text


def test_a_gradient_counts_by_its_own_size():
    logits, large, small = torch.ones(2), torch.full((2,), 100.0), torch.full((2,), 1.0)
    expected = [logits, large, small]
    assert folders._worst_of([logits, large, small * 1.01], expected) > folders.TOLERANCE
    assert folders._worst_of([logits, large * 1.01, small], expected) > folders.TOLERANCE
    # Where the true one is 0, all that is left is rounding.
    nothing = [logits, large, torch.zeros(2)]
    assert folders._worst_of([logits, large, torch.full((2,), 1e-6)], nothing) < folders.TOLERANCE


def test_a_folder_without_a_small_model_says_why(monkeypatch):
    # It has no class that gives logits.
    with pytest.raises(ValueError, match="expected a model of 'vitpose_backbone' of small sizes"):
        build("vitpose_backbone")
    monkeypatch.setattr(folders, "WITHOUT_ROUTER", {})
    found = folders.check("vitpose_backbone", ("whole",))
    assert list(found) == ["whole"] and found["whole"].startswith("no small model: ValueError")


def test_experts_that_no_router_chooses_are_no_failure():
    found = folders.check("vitpose_backbone")
    assert set(found.values()) == {"no router: experts are chosen by the data set of an image"}
    lines = folders.table({"vitpose_backbone": found}).splitlines()
    assert lines[2:] == ["| vitpose_backbone | " + " | ".join("-" * len(folders.PARTS)) + " |"]
