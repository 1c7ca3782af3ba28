"""The benchmark itself: what it reports, what it refuses, what it writes."""

import json

import pytest
import torch

from moe_mlir_bench.bench import machine, page, reading, regression, timing
from moe_mlir_bench.bench.__main__ import main
from moe_mlir_bench.bench.cases import ROWS
from moe_mlir_bench.bench.cases.selection import topk_renorm
from moe_mlir_bench.bench.machine import Machine
from moe_mlir_bench.bench.rows import FIELDS, Context, Goal

MACHINE = Machine("a CPU", 200.0, 180.0, 400.0, 5.0, 20.0, 30.0, level="AVX2")
CONTRACT = {
    "op", "shape", "dtype", "threads", "ours_us", "eager_us", "inductor_us", "peer", "peer_us",
    "ratio", "limit_us", "percent_of_limit", "peak_mb",
}  # fmt: skip


@pytest.fixture(autouse=True)
def keep_settings():
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


@pytest.fixture
def known_machine(monkeypatch):
    """Peaks that need no measuring."""
    monkeypatch.setattr(machine, "measure", lambda: MACHINE)


def run(tmp_path, *options):
    path = tmp_path / "records.json"
    code = main(["--quick", "--no-inductor", "--json", str(path), *options])
    return code, json.loads(path.read_text())


def test_a_row_is_measured_and_recorded(tmp_path):
    code, (record,) = run(tmp_path, "--rows", "topk_renorm n=4096 e=16 k")
    assert code == 0
    assert CONTRACT <= set(record) and set(FIELDS) <= set(record)
    assert record["shape"] == {"n": 4096, "e": 16, "k": 2}
    assert 0 < record["ours_us"] <= record["ours_median_us"]
    assert record["ratio"] == pytest.approx(record["eager_us"] / record["ours_us"])
    assert record["limit_us"] == max(record["limit_terms"].values())
    assert record["machine"]["fma_gflops"] > 1


def test_a_backward_row_is_measured(tmp_path, known_machine):
    _, (record,) = run(tmp_path, "--rows", "topk_renorm_backward n=4096 e=64 k=8 renorm=True")
    assert record["ours_us"] > 0 and record["eager_us"] > 0


def test_every_stated_goal_is_quick_or_of_many_sizes_or_a_compilation():
    for row in ROWS:
        if row.goals and row.op not in ("layer", "compile", "gated_experts", "product"):
            assert row.quick, row.title


def test_of_many_sizes_a_few_are_quick():
    for op in ("gated_experts", "product"):
        quick = [row.quick for row in ROWS if row.op == op]
        assert 0 < sum(quick) < len(quick)


def test_titles_tell_rows_apart():
    titles = [row.title for row in ROWS]
    assert len(set(titles)) == len(titles)


def test_an_unknown_row_is_refused():
    with pytest.raises(SystemExit, match="--list prints the titles"):
        main(["--rows", "no such row"])


def test_an_unknown_op_is_refused_with_those_known():
    with pytest.raises(SystemExit, match="mad_dispersion.*found 'softmax'"):
        main(["--op", "softmax"])


def test_a_wrong_result_is_not_timed():
    case = topk_renorm(64, 8, 2)
    ours = case.ours
    case.ours = lambda z: (ours(z)[0] + 0.5, ours(z)[1])
    with pytest.raises(AssertionError, match="gates: error 5.00e-01"):
        case.measure(Context(MACHINE, rounds=1, inductor=False))


# ------------------------------------------------------------------ the limit


def test_the_limit_is_its_largest_term():
    limit = MACHINE.limit(flops=4e5, moved=2e4, exps=5e3)
    assert (limit.flops_us, limit.memory_us, limit.exps_us) == (2.0, 1.0, 1.0)
    assert (limit.us, limit.bound) == (2.0, "flops")


def test_the_limit_of_bf16_counts_dot_products():
    assert MACHINE.limit(4e5, 0, dtype=torch.bfloat16).us == 1.0
    without = Machine("a CPU", 200.0, 180.0, None, 5.0, 20.0, 30.0)
    assert without.limit(4e5, 0, dtype=torch.bfloat16).us == 2.0


def test_a_goal_may_depend_on_what_the_library_reaches():
    goal = Goal("ratio", 3, beside_fast=1.3)
    assert goal.on(MACHINE).bound == 1.3
    slow = Machine("a CPU", 200.0, 90.0, 400.0, 5.0, 20.0, 30.0)
    assert goal.on(slow).bound == 3


def test_a_call_is_measured_beside_an_empty_op_of_torch(tmp_path, known_machine):
    _, (record,) = run(tmp_path, "--rows", "call kernel=adjacency_gate")
    assert record["floor_us"] > 0
    assert record["floors"] == record["ours_us"] / max(record["floor_us"], 1)
    (goal,) = record["goals"]
    assert goal["found"] == record["floors"]
    page.write_page(tmp_path / "page.md", [record])
    assert f"| {record['floor_us']:.1f} | time <= 3 us or empty ops" in (
        tmp_path / "page.md"
    ).read_text()


def test_goals_bound_from_either_side():
    assert Goal("ratio", 2).is_met({"ratio": 2.0})
    assert not Goal("ratio", 2).is_met({"ratio": None})
    assert Goal("ours_us", 3, at_most=True).is_met({"ours_us": 2.5})
    assert not Goal("ours_us", 3, at_most=True).is_met({"ours_us": 3.5})


@pytest.mark.parametrize("runs", reading._RUNS)
def test_the_roof_of_reading_reads_everything(runs):
    x = torch.randint(0, 4, (8192,)).float()
    out = torch.empty(())
    reading._compile(runs, 16)(x, out)
    assert out == x.sum()


def test_rounds_end_with_their_time():
    turns = timing.Turns({"ours": [lambda: None]}, threads=1)
    assert len(turns.samples(100, seconds=0)["ours"]) == 3
    assert len(turns.samples(5)["ours"]) == 5


# ----------------------------------------------------------- what it writes


def make(ratio, **values):
    record = dict.fromkeys(FIELDS)
    record.update(op="topk_renorm", shape={"n": 1}, dtype="float32", threads=1, ratio=ratio,
                  title="topk_renorm n=1 float32", ours_us=10.0, ours_median_us=11.0,
                  eager_us=10.0 * ratio, goals=[], why="",
                  machine=MACHINE.facts(), **values)  # fmt: skip
    return record


def test_ratios_are_compared_and_not_times(tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps([make(10.0)]))
    slow = make(9.0)
    slow["ours_us"] *= 100
    assert regression.compare([slow], path) == []
    (line,) = regression.compare([make(6.0)], path)
    assert "expected a ratio of at least 7.50 (it was 10.00), found 6.00" in line


def test_a_regression_fails_the_run(tmp_path, known_machine):
    _, records = run(tmp_path, "--rows", "topk_renorm n=4096 e=16 k")
    records[0]["ratio"] *= 100
    before = tmp_path / "before.json"
    before.write_text(json.dumps(records))
    code, _ = run(tmp_path, "--rows", "topk_renorm n=4096 e=16 k", "--compare", str(before))
    assert code == 1


def test_the_page_keeps_what_others_wrote(tmp_path):
    path = tmp_path / "Performance.md"
    missed = {"goal": "ratio >= 20x", "found": 10.0, "met": False}
    page.write_page(path, [make(10.0) | {"goals": [missed], "why": "A reason."}])
    path.write_text(path.read_text() + "\n## GPU\nMeasured elsewhere.\n")
    page.write_page(path, [make(30.0)])
    text = path.read_text()
    assert "Measured elsewhere." in text and text.count("## CPU") == 1
    assert "Every goal that was measured is met." in text and "A reason." not in text


def test_the_page_has_a_part_for_each_machine(tmp_path):
    """And of several runs on one the last time of each row."""
    path, files = tmp_path / "Performance.md", []
    other = {**MACHINE.facts(), "level": "AVX-512"}
    for run in ([make(10.0)], [make(20.0) | {"machine": other}], [make(30.0)]):
        files.append(tmp_path / f"{len(files)}.json")
        files[-1].write_text(json.dumps(run))
    assert main(["--records", *map(str, files), "--page", str(path)]) == 0
    first, second = path.read_text().split("## CPU: a CPU, AVX-512")
    assert "## CPU: a CPU, AVX2" in first and "| 30.00 |" in first and "| 10.00 |" not in first
    assert "| 20.00 |" in second
    path.write_text(path.read_text() + "\n## GPU\n")
    assert main(["--records", str(files[0]), "--page", str(path)]) == 0
    assert "| 10.00 |" in path.read_text() and "| 20.00 |" in path.read_text()
    third = json.dumps([make(40.0) | {"machine": {**other, "level": "SSE"}}])
    files[0].write_text(third)
    assert main(["--records", str(files[0]), "--page", str(path)]) == 0
    assert path.read_text().index("CPU, AVX-512") < path.read_text().index("CPU, SSE") < \
        path.read_text().index("## GPU")


def test_the_page_says_by_how_much_a_goal_is_missed_and_why(tmp_path):
    path = tmp_path / "Performance.md"
    missed = {"goal": "ratio >= 20x", "found": 10.0, "met": False}
    page.write_page(path, [make(10.0) | {"goals": [missed], "why": "A reason."}])
    assert "ratio >= 20x, found 10. A reason." in path.read_text()
    assert (tmp_path / "performance-a-cpu-avx2.svg").read_text().startswith("<svg")


def test_a_goal_that_was_not_measured_is_not_missed(tmp_path):
    path = tmp_path / "Performance.md"
    unknown = {"goal": "ratio >= 1.1x", "found": None, "met": False}
    page.write_page(path, [make(10.0) | {"goals": [unknown]}])
    text = path.read_text()
    assert "ratio >= 1.1x (not measured)" in text and "missed" not in text
