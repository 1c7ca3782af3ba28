"""examples.reproduce: the quick run, and the words that it finds for differences."""

import pathlib
import sys
from types import SimpleNamespace

import pytest
import torch
from support import run_python

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from examples.reproduce import report  # noqa: E402
from examples.reproduce.methods import METHODS, Method  # noqa: E402
from examples.reproduce.model import LanguageModel, Sizes  # noqa: E402


def reproduce(*args):
    return run_python("-m", "examples.reproduce", *args, cwd=ROOT)


def test_the_quick_run_trains_every_method_and_draws(tmp_path):
    arguments = ("--quick", "--impl", "torch", "--out", tmp_path)
    first = reproduce(*arguments)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    for method in METHODS:
        assert any(line.startswith(f"{method.name}  ") for line in lines), method.name
    assert lines[-1].startswith(f"ok: {len(METHODS)} methods")
    assert f"of {sum(len(m.claims) for m in METHODS)} claims" in first.stdout
    pictures = {path.stem for path in (tmp_path / "plots").glob("*.png")}
    assert {"fluctuation", "instability", "entropy-ratio", "adjacency-symphony"} <= pictures
    # A finished run is read, not repeated: the same table to the last digit.
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    again = reproduce(*arguments)
    assert again.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == runs
    table = [line for line in lines if line.startswith("SMoE  ")]
    assert [line for line in again.stdout.splitlines() if line.startswith("SMoE  ")] == table


def test_an_unknown_method_is_an_error(tmp_path):
    result = reproduce("--quick", "--methods", "GPT", "--out", tmp_path)
    assert result.returncode == 2 and "expected --methods to name some of: SMoE" in result.stderr


def test_methods_of_a_seed_start_with_the_same_weights_but_of_the_router():
    sizes = Sizes(layers=3, width=16, heads=2, hidden=8)
    start = {}
    for method in METHODS:
        torch.manual_seed(5)
        state = LanguageModel(sizes, method).state_dict()
        start[method.name] = {n: t for n, t in state.items() if ".router." not in n}
    for name, weights in start.items():
        common = weights.keys() & start["SMoE"].keys()
        assert len(common) >= 18 or name == "GLaM"
        for key in common:
            assert torch.equal(weights[key], start["SMoE"][key]), (name, key)
    torch.manual_seed(6)
    other = LanguageModel(sizes, METHODS[0]).state_dict()
    assert all(not torch.equal(other[k], t) for k, t in start["SMoE"].items() if "norm" not in k)
    # Layers do not start alike, nor do their routers.
    blocks = LanguageModel(sizes, METHODS[0]).blocks
    assert not torch.equal(blocks[0].moe.w_in, blocks[1].moe.w_in)
    assert not torch.equal(blocks[0].moe.router.weight, blocks[1].moe.router.weight)
    torch.manual_seed(7)
    routers = [LanguageModel(sizes, METHODS[0]).blocks[0].moe.router for _ in range(2)]
    assert not torch.equal(routers[0].weight, routers[1].weight)


def test_a_method_on_a_base_is_compared_with_that_base():
    made = {m.name: m.make(16, 8, 2, impl="torch") for m in METHODS}
    assert made["Similarity-XMoE"].base.tau == made["XMoE"].tau
    names = {m.name for m in METHODS}
    assert {claim[2] for m in METHODS for claim in m.claims} <= names


def test_claims_have_the_direction_of_the_papers_table():
    """P4 Table 16: Symphony 34.29, Symphony + Similarity 34.50, Similarity 35.06."""
    perplexity = {"Symphony": 34.29, "Symphony, Similarity": 34.50, "Similarity-SMoE": 35.06}
    (method,) = (m for m in METHODS if m.name == "Symphony, Similarity")
    assert {claim[2] for claim in method.claims} == {"Symphony", "Similarity-SMoE"}
    for metric, direction, against, _ in method.claims:
        lower = perplexity[method.name] < perplexity[against]
        assert metric == "loss" and direction == ("lower" if lower else "higher")


def runs(*losses):
    return [SimpleNamespace(seed=i, loss=x, entropy=None) for i, x in enumerate(losses)]


@pytest.mark.parametrize(
    "method,word",
    [
        ((1.0, 1.1, 1.2), "shows"),
        ((3.0, 3.1, 3.2), "opposite"),
        ((1.9, 2.2, 1.9), "undecided"),
        ((1.0, 1.9999, 1.9999), "undecided"),  # one seed carries it all
    ],
)
def test_a_direction_shows_only_where_all_seeds_agree(method, word):
    claim = ("loss", "lower", "SMoE", "paper")
    assert report.verdict(claim, runs(*method), runs(2.0, 2.0, 2.0))[0] == word


def test_one_seed_or_a_missing_metric_gives_no_verdict():
    claim = ("loss", "lower", "SMoE", "paper")
    assert report.verdict(claim, runs(1.0), runs(2.0))[0] == "one seed: no verdict"
    claim = ("entropy", "lower", "SMoE", "paper")
    assert report.verdict(claim, runs(1.0), runs(2.0))[0] == "not measured"


def test_directions_tell_shown_and_opposite_claims_apart():
    claims = (("loss", "lower", "SMoE", "paper A"),)
    methods = [Method("good", None, claims), Method("bad", None, claims)]
    results = {"SMoE": runs(2.0, 2.1), "good": runs(1.0, 1.2), "bad": runs(3.0, 3.2)}
    lines = report.directions(methods, results).splitlines()
    assert lines[0].startswith("shows") and "good: lower loss than SMoE (paper A)" in lines[0]
    assert lines[1].startswith("opposite") and "+1.000" in lines[1]
    assert lines[2] == "of 2 claims: shows 1, opposite 1"
