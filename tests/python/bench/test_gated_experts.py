"""Rows of experts' layers: their loads, their peers, and what is said of a peer that is not there."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from moe_mlir_bench.bench import page, peers  # noqa: E402
from moe_mlir_bench.bench.cases.gated_experts import _LOADS, GatedExperts  # noqa: E402
from moe_mlir_bench.bench.cases.products import product  # noqa: E402
from moe_mlir_bench.bench.machine import Machine  # noqa: E402
from moe_mlir_bench.bench.rows import FIELDS, Context  # noqa: E402

MACHINE = Machine("a CPU", 200.0, 180.0, 400.0, 5.0, 20.0, 30.0)
ALL = {"eager", "grouped_mm", "batched_mm", "inductor", "vllm", "onnxruntime"}


@pytest.fixture(autouse=True)
def keep_settings():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def small(dtype, *, tokens=4, load="decode"):
    return GatedExperts(64, 32, 8, 2, tokens, load, dtype)


def measure(row, **options):
    return row.measure(Context(MACHINE, rounds=1, **options))


def make_layer():
    return peers.Layer(torch.randn(8, 64, 64), torch.randn(8, 64, 32))


def draw(load, tokens, count=6):
    return torch.stack(_LOADS[load](8, 2, tokens, count, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_every_peer_or_its_reason(dtype):
    record = measure(small(dtype), inductor=dtype == torch.float32)
    assert set(FIELDS) <= set(record)
    assert {"eager", "grouped_mm", "batched_mm"} <= set(record["rivals_us"])
    assert set(record["rivals_us"]) | set(record["missing"]) == ALL
    assert all(record["missing"].values())
    assert record["peer_us"] == min(record["rivals_us"].values())
    assert record["ratio"] == pytest.approx(record["peer_us"] / record["ours_us"])


def test_a_wrong_result_is_not_timed():
    row, layer = small(torch.float32), make_layer()
    right = peers.transformers(layer, "eager")
    (tokens, *_) = row._token_sets()
    row._check({"ours": [right]}, layer, tokens)
    with pytest.raises(AssertionError, match="vllm: error"):
        row._check({"vllm": [lambda *inputs: 1.01 * right(*inputs)]}, layer, tokens)


def test_only_weights_that_are_read_count():
    record = measure(small(torch.float32, tokens=1), inductor=False)
    chosen = 2 * 3 * 64 * 32 * 4
    assert record["limit_terms"]["memory_us"] == pytest.approx(chosen / MACHINE.read_gbytes * 1e-3)
    assert record["read_gbytes"] == pytest.approx(chosen / record["ours_us"] * 1e-3)


@pytest.mark.parametrize("load", _LOADS)
def test_a_token_chooses_an_expert_once(load):
    ids = draw(load, 20).sort().values
    assert ids.shape == (6, 20, 2)
    assert bool((ids[..., 0] != ids[..., 1]).all()) and int(ids.max()) < 8


def test_loads_are_what_they_are_called():
    balanced, hot, decode = draw("balanced", 16), draw("hot", 20), draw("decode", 1)
    for ids in balanced:
        assert torch.bincount(ids.flatten()).tolist() == [4] * 8
    for ids in hot:
        assert int(torch.bincount(ids.flatten(), minlength=8).max()) == 16
    # All experts come before one comes again.
    assert sorted(decode[:4].flatten().tolist()) == list(range(8))


# ----------------------------------------------------------------- missing peers


def test_a_folder_without_vllm_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_MLIR_BENCH_VLLM", str(tmp_path))
    peers._load_vllm.cache_clear()
    with pytest.raises(peers.Unavailable, match=f"expected _C_AVX.*so in {tmp_path}"):
        peers.vllm(make_layer())
    monkeypatch.undo()
    peers._load_vllm.cache_clear()


def test_a_peer_that_copies_too_much_is_left_out():
    with pytest.raises(peers.Unavailable, match="copies the chosen weights of each token, 1.2 GB"):
        peers.batched_mm(make_layer(), 25_000, 2)
    with pytest.raises(peers.Unavailable, match="takes 1152921504.6 GB"):
        peers._require_memory(1 << 60)


def test_the_page_says_which_peers_ran(tmp_path):
    record = dict.fromkeys(FIELDS)
    record.update(
        op="gated_experts", title="gated_experts d=1 float32", threads=1, ours_us=10.0, why="",
        eager_us=20.0, rivals_us={"eager": 20.0}, missing={"vllm": "needs 7.5 GB"}, ratio=2.0,
        read_gbytes=3.0, gflops=4.0, limit_us=5.0, bound="memory", percent_of_limit=50.0, goals=[],
        unpacked_us=15.0, machine=MACHINE.facts(),
    )  # fmt: skip
    path = tmp_path / "Performance.md"
    other = {**record, "title": "gated_experts d=2 float32", "missing": {"vllm": "needs 8.5 GB"}}
    page.write_page(path, [record, other])
    text = path.read_text()
    assert "| 10 | 15 | 20 |  |  |  |  |  | 2.00 | 3.0 | 4.0 | 5 memory | 50 |" in text
    assert "Measured beside ours: eager." in text
    assert "- `vllm` is missing in 2 of 2 rows: needs some GB." in text


def test_a_product_of_an_imported_layer_is_measured():
    record = product(8, 16, 32, torch.bfloat16).measure(Context(MACHINE, rounds=1, inductor=False))
    assert record["ours_us"] > 0 and record["ratio"] == record["eager_ratio"]
