"""The numbers of kernels: modelled for a CPU or read from a table, and no bit depends on them."""

import json

import cpus
import pytest
import test_products
import torch

from moe_mlir._native import native
from moe_mlir.cli import tune
from moe_mlir.compiler import jit, tuning_table

KEY = native().describe_cpu("native")


def table(numbers, key=KEY):
    return json.dumps({"moe_mlir_tuning": 1, "cpus": {key: numbers}})


@pytest.fixture
def named(tmp_path, monkeypatch):
    """Makes a table the one that MOE_MLIR_TUNING names."""

    def write(text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(text)
        monkeypatch.setenv("MOE_MLIR_TUNING", str(path))
        return path
    return write


PROBES = [
    tune.Probe("product", tune.logits_kernel(torch.float32, torch.float32, None, 530, 513),
               {"n": 21}),
    tune.Probe("bf16", tune.logits_kernel(torch.bfloat16, torch.bfloat16, None, 530, 513),
               {"n": 21}),
    tune.Probe("experts", tune.linear_kernel(
        torch.float32, 300, 140, torch.int32, None, None, False,
        tune.ExpertActivation(activation="silu", gate="concatenated")), {"r": 60, "e": 3, "b": 4}),
    tune._mixing(100, 40),
    tune._selection(64, 8),
]
# All at once, on either side of what the model says.
NUMBERS = [
    {"product-vectors": 2, "product-rows": 3, "product-panels": 1, "expert-rows": 7,
     "mix-queries": 6, "fetch-bytes": 64, "tile-size": 5},
    {"product-vectors": 2, "product-rows": 6, "product-panels": 31, "expert-rows": 999,
     "mix-queries": 600, "fetch-bytes": 99999, "tile-size": 1000},
]  # fmt: skip


@pytest.mark.drawn(2)
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.title)
def test_no_bit_depends_on_the_numbers(probe):
    inputs = probe.inputs(0)
    expected = tune._run(probe.compile(native().cpu_pipeline("native")), probe, inputs)
    assert all(torch.isfinite(y).all() and y.any() for y in expected)
    for numbers in NUMBERS:
        pipeline = native().cpu_pipeline("native", table(numbers))
        found = tune._run(probe.compile(pipeline), probe, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), numbers


@pytest.mark.drawn(2)
@pytest.mark.parametrize("cpu", ["x86-64-v2", "x86-64-v3", "skylake-avx512", "icelake-server"])
def test_products_and_experts_are_right_at_every_level(cpu):
    if cpu not in cpus.runnable():
        pytest.skip(f"this machine does not run code for {cpu}")
    for probe in (PROBES[0], PROBES[2]):
        executable = native().Executable(native().compile_object(probe.kernel.text(), cpu=cpu))
        inputs = probe.inputs(1)
        (y,) = tune._run(executable.function(probe.kernel.op), probe, inputs)
        x, w = (t.double() for t in inputs[:2])
        if probe.title == "experts":
            gate, up = torch.bmm(x.view(3, 20, -1), w.mT).view(60, -1).chunk(2, -1)
            expected = torch.nn.functional.silu(gate) * up
        else:
            expected = x @ w.T
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=2e-6)


def test_models_follow_registers_and_the_second_cache():
    def panels(cpu):
        pipeline = native().cpu_pipeline(cpu)
        return int(pipeline.partition("product-panels=")[2].split()[0])

    assert [panels(cpu) for cpu in ("znver4", "znver5", "cascadelake", "icelake-server",
                                    "sapphirerapids")] == [4, 4, 4, 5, 8]
    assert [panels(cpu) for cpu in ("haswell", "znver3", "x86-64-v3")] == [4, 8, 8]


def test_a_table_is_read_and_is_part_of_every_key(named):
    named(table({"product-panels": 3}))
    assert "product-panels=3" in tuning_table.cpu_pipeline("native")
    test_products.test_infinite_and_missing_numbers_stay_in_their_rows_and_columns(
        torch.float32, 33, "n, k")
    text = test_products.product(70, 33, torch.float32, "n, k")
    first = jit.compile_cached(text)
    named(table({"product-panels": 2}))
    assert jit.compile_cached(text) is not first
    named(table({"product-panels": 2}, key="another CPU"))
    assert tuning_table.cpu_pipeline("native") == native().cpu_pipeline("native")


def test_without_a_table_numbers_are_the_model_s(tmp_path, monkeypatch):
    monkeypatch.delenv("MOE_MLIR_TUNING", raising=False)
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path))
    assert tuning_table.cpu_pipeline("native") == native().cpu_pipeline("native")
    (tmp_path / "tuning.json").write_text(table({"product-panels": 3}))
    monkeypatch.setenv("MOE_MLIR_TUNING", "off")
    assert tuning_table.cpu_pipeline("native") == native().cpu_pipeline("native")


@pytest.mark.parametrize(("text", "problem"), [
    ("{", "expected JSON"),
    ("[]", 'expected an object with "moe_mlir_tuning": 1'),
    ('{"moe_mlir_tuning": 1}', 'expected an object "cpus"'),
    (table(3), "expected an object of numbers"),
    (table({"rows": 3}), "expected names of numbers of kernels, found 'rows'"),
    (table({"product-panels": "8"}), "expected 'product-panels' to be an integer"),
    (table({"product-panels": 0}), "expected 'product-panels' to be an integer of 1 to"),
    (table({"product-panels": 65}), "expected 'product-panels' to be 0 to 64, found 65"),
    (table({"product-rows": 600}), "to take at most"),
    (table({"mix-queries": 100}), "a multiple of the 6 rows of a tile"),
])  # fmt: skip
def test_an_unsound_table_is_an_error_if_named_and_else_a_warning(named, tmp_path, monkeypatch,
                                                                  text, problem):
    path = named(text)
    with pytest.raises(ValueError, match="MOE_MLIR_TUNING: cannot use") as error:
        tuning_table.cpu_pipeline("native")
    assert problem in str(error.value) and str(path) in str(error.value)
    monkeypatch.delenv("MOE_MLIR_TUNING")
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path))
    (tmp_path / "tuning.json").write_text(text)
    with pytest.warns(RuntimeWarning, match="kernels have the modelled numbers"):
        assert tuning_table.cpu_pipeline("native") == native().cpu_pipeline("native")


def test_a_missing_table_that_is_named_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_MLIR_TUNING", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="none.json"):
        tuning_table.cpu_pipeline("native")


def test_writing_keeps_other_cpus_and_replaces_an_unsound_table(tmp_path, capsys):
    path = tmp_path / "folder" / "tuning.json"
    tune.write(path, "one", {"product-panels": 2})
    tune.write(path, "two", {})
    tune.write(path, "one", {"product-panels": 4})
    assert json.loads(path.read_text())["cpus"] == {"one": {"product-panels": 4}, "two": {}}
    path.write_text('{"moe_mlir_tuning": 9}')
    tune.write(path, "two", {})
    assert json.loads(path.read_text())["cpus"] == {"two": {}}
    assert "is no sound table and is replaced" in capsys.readouterr().err
    assert [p.name for p in path.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"scripts": {"build": "make"}}', "a diary"])
def test_a_file_that_is_no_table_is_kept(content, command, tmp_path):
    path = tmp_path / "notes.json"
    path.write_text(content)
    status, output, errors = command("--seconds", "0", MOE_MLIR_TUNING=str(path))
    assert (status, output) == (2, "") and f"expected {path} to be free or a table" in errors
    with pytest.raises(ValueError, match="another file"):
        tune.write(path, "one", {})
    assert path.read_text() == content and list(tmp_path.iterdir()) == [path]


def test_a_table_where_others_can_write_is_not_read(tmp_path, monkeypatch):
    """As code is not read from there."""
    monkeypatch.delenv("MOE_MLIR_TUNING", raising=False)
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    path = tmp_path / "cache" / "tuning.json"
    path.write_text(table({"fetch-bytes": 2048}))
    assert "fetch-bytes=2048" in tuning_table._cpu_pipeline.__wrapped__("native", path, False)
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="to be writable by its owner alone"):
        assert tuning_table._cpu_pipeline.__wrapped__("native", path, False) == native().cpu_pipeline(
            "native")
    (tmp_path / "cache").chmod(0o700)
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.warns(RuntimeWarning, match="modelled numbers"):
        tuning_table._cpu_pipeline.__wrapped__("native", path, False)


def test_a_question_is_measured_and_only_what_differs_is_asked():
    tuner = tune.Tuner("native", 1.0)
    lines = tuner.ask([{"product-panels": n} for n in (2, 4)], [PROBES[0]])
    default = native().cpu_pipeline("native")
    asked = [n for n in (2, 4) if f"product-panels={n} " not in default]
    assert [line.split()[0] for line in lines] == [f"product-panels={n}" for n in asked]
    assert tuner.kept in ({}, *({"product-panels": n} for n in asked))


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command in this process: (exit status, output, errors)."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("MOE_MLIR_CPU", "native")

    def run(*arguments, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        try:
            status = tune.main(arguments)
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()
    yield run
    torch.set_num_threads(threads)


def test_the_command_writes_what_is_read_then(command, tmp_path):
    folder = {"MOE_MLIR_CACHE_DIR": str(tmp_path), "MOE_MLIR_TUNING": ""}
    path = tmp_path / "tuning.json"
    status, output, errors = command("--seconds", "0", **folder)
    assert status == 0 and not errors and "not all was asked within 0 s" in output
    assert json.loads(path.read_text())["cpus"] == {KEY: {}}
    path.write_text(table({"fetch-bytes": 2048}))
    _, output, _ = command("--list", **folder)
    assert KEY in output and "fetch-bytes=2048" in output and str(path) in output


def test_the_command_says_what_it_cannot_do(command):
    status, _, errors = command("--cpu", "zx81")
    assert status == 2 and "found 'zx81'" in errors
    status, _, errors = command("--cpu", "native", MOE_MLIR_TUNING="off")
    assert status == 2 and "--dry-run" in errors
    status, output, _ = command("--help")
    assert status == 0 and "--seconds" in output and "bit of a result" in output
