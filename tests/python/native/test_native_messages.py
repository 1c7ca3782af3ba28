"""What the compiler says while it works: remarks, logs, progress, and files that reproduce failures."""

import io
import logging
import os
import re
import sys
import threading
import time

import pytest
from conftest import AFFINE
from support import BUILD, run_python

from moe_mlir._support import environment, log
from moe_mlir._support.progress import Clock
from moe_mlir.compiler import crash_report, jit, phases

# The dispatch needs all choices at once, so it stays out of the loop of the selection.
UNFUSED = """
func.func @count(%z: tensor<?x16xf32>, %slots: tensor<?x2xi64>, %offsets: tensor<17xi32>,
                 %counts: tensor<16xi32>) -> tensor<16xi32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x16xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi64>
  %g, %i = moe.topk_renorm ins(%z : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi64>)
      {kind = #moe.score_kind<logits>} -> tensor<?x2xf32>, tensor<?x2xi64>
  %s, %o, %c = moe.dispatch ins(%i : tensor<?x2xi64>)
      outs(%slots, %offsets, %counts : tensor<?x2xi64>, tensor<17xi32>, tensor<16xi32>)
      -> tensor<?x2xi64>, tensor<17xi32>, tensor<16xi32>
  return %c : tensor<16xi32>
}
"""


@pytest.fixture(autouse=True)
def private_reproducers(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_MLIR_REPRODUCER_DIR", str(tmp_path / "reproducers"))


def python(code, **environment):
    """stdout and stderr of another process, which sets up its logs and random numbers itself."""
    path = os.pathsep.join(p for p in sys.path if p)
    done = run_python("-c", code, fresh=True, timeout=120,
                      env={**os.environ, "PYTHONPATH": path, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# ------------------------------------------------------------------ remarks and logs


def test_the_compiler_hands_out_its_remarks(moe):
    remarks = []
    moe.compile_object(UNFUSED, remarks=remarks)
    assert any("not fused with moe.topk_renorm" in r and "-:" in r for r in remarks), remarks
    assert moe.compile_object(UNFUSED)


def test_remarks_reach_the_logger_although_cached(caplog):
    jit.compile_cached(UNFUSED)
    jit._loaded.clear()
    with caplog.at_level(logging.INFO, "moe_mlir.remarks"):
        jit.compile_cached(UNFUSED)
    (record, *_) = [r for r in caplog.records if r.name == "moe_mlir.remarks"]
    assert "not fused with moe.topk_renorm" in record.getMessage()


def test_compilations_and_the_cache_are_logged(caplog):
    with caplog.at_level(logging.DEBUG, "moe_mlir"):
        for _ in range(2):
            jit.compile_cached(AFFINE)
            jit._loaded.clear()
    # The remarks are wanted too at this level, so the cache was left alone.
    assert not [r for r in caplog.records if r.name == "moe_mlir.cache"]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "moe_mlir.remarks"), \
            caplog.at_level(logging.DEBUG, "moe_mlir.compile"), \
            caplog.at_level(logging.DEBUG, "moe_mlir.cache"):
        jit.compile_cached(AFFINE)
    assert [r.name for r in caplog.records] == ["moe_mlir.cache"]
    assert "found" in caplog.records[0].getMessage()


PROGRAM = "import torch, moe_mlir; moe_mlir.topk_renorm(torch.randn(3, 8), 2)"


def test_a_library_is_silent_and_the_variable_shows_topics(tmp_path):
    out, err = python(PROGRAM, MOE_MLIR_CACHE_DIR=str(tmp_path / "a"))
    assert out == err == ""
    out, err = python(PROGRAM, MOE_MLIR_CACHE_DIR=str(tmp_path / "a"), MOE_MLIR_LOGS="cache")
    assert out == "" and "moe_mlir.cache: found" in err
    _, err = python(PROGRAM, MOE_MLIR_CACHE_DIR=str(tmp_path / "b"), MOE_MLIR_LOGS="compile, cache")
    assert "moe_mlir.compile: compiled topk_renorm for moe-to-cpu in" in err
    assert "moe_mlir.cache: missed" in err


def test_torch_shows_our_logs_too(tmp_path):
    """By the name of the package: torch reads TORCH_LOGS before it knows names of others."""
    _, err = python(PROGRAM, MOE_MLIR_CACHE_DIR=str(tmp_path), TORCH_LOGS="moe_mlir")
    assert "compiled topk_renorm for moe-to-cpu in" in err and "jit.py:" in err
    asks = "import logging, torch; torch._logging.set_logs(modules={'moe_mlir': logging.INFO}); "
    _, err = python(asks + PROGRAM, MOE_MLIR_CACHE_DIR=str(tmp_path / "other"))
    assert "compiled topk_renorm for moe-to-cpu in" in err


def test_an_unknown_topic_warns_and_the_known_ones_are_shown():
    stream = io.StringIO()
    topic = logging.getLogger("moe_mlir.cache")
    before = list(topic.handlers), topic.level, topic.propagate
    try:
        with pytest.warns(RuntimeWarning, match="found chatter"):
            log.show("chatter,cache", stream)
        topic.debug("hello")
    finally:
        topic.handlers[:], topic.propagate = before[0], before[2]
        topic.setLevel(before[1])
    assert stream.getvalue() == "moe_mlir.cache: hello\n"


def test_variables_with_typing_errors_are_found():
    (sentence,) = environment.unknown({"MOE_MLIR_DUMPDIR": "1", "MOE_MLIR_LOGS": "all"})
    assert "did you mean MOE_MLIR_DUMP_DIR?" in sentence


# ------------------------------------------------------------------ progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_clock_appears_after_its_delay_and_goes():
    stream = Terminal()
    with Clock("compiling f", delay=0.01, stream=stream):
        deadline = time.monotonic() + 10
        while "compiling f" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
    assert "\rcompiling f (0 s)\033[K" in stream.getvalue()
    assert stream.getvalue().endswith("\r\033[K")
    assert "moe" not in [t.name for t in threading.enumerate()]


def test_what_is_quick_shows_nothing():
    stream = Terminal()
    with Clock("compiling f", delay=60, stream=stream):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("variable, value", [("MOE_MLIR_PROGRESS", "0"), ("RANK", "1")])
def test_no_clock_where_nobody_watches(monkeypatch, variable, value):
    stream = io.StringIO()
    with Clock("compiling f", delay=0, stream=stream) as clock:
        assert clock._thread is None
    monkeypatch.setenv(variable, value)
    with Clock("compiling f", delay=0, stream=Terminal()) as clock:
        assert clock._thread is None


# ------------------------------------------------------------------ reproducers


def test_a_failed_compilation_names_the_command_that_repeats_it(moe):
    with pytest.raises(moe.MoeError) as caught:
        jit.compile_cached("func.func @f( {")
    error = caught.value
    command = f"moe reproduce {error.reproducer}"
    assert command in str(error) and error.diagnostics
    assert error.reproducer.stat().st_mode & 0o777 in (0o644, 0o600)
    done = run_python(BUILD / "bin" / "moe", *command.split()[1:])
    assert done.returncode == 1
    assert error.diagnostics[0].partition("error: ")[2] in done.stderr


def test_a_reproducer_is_ir_and_remembers_how_it_was_compiled(moe, tmp_path, capsys):
    path = crash_report.write(tmp_path, "ptx", AFFINE, "sm_90", "some error\non two lines")
    kind, text, target = crash_report.read(path)
    assert (kind, target) == ("ptx", "sm_90") and "// on two lines" in text
    assert moe.Module.parse(text)
    assert crash_report.main([str(path), "--phases", str(tmp_path / "phases")]) == 0
    assert "compiled: ptx of" in capsys.readouterr().out
    assert phases.read_folder(tmp_path / "phases")


def test_phases_lead_to_the_pass_that_failed(moe, tmp_path, capsys):
    with pytest.raises(moe.MoeError) as caught:
        jit.compile_cached(AFFINE, pipeline="canonicalize")
    path = caught.value.reproducer
    assert crash_report.main([str(path), "--phases", str(tmp_path / "phases")]) == 1
    assert str(tmp_path / "phases") in capsys.readouterr().err
    assert (tmp_path / "phases" / "00-input.mlir").exists()


def test_a_reproducer_replaces_a_link_and_leaves_what_it_names(moe, tmp_path):
    path = crash_report.write(tmp_path, "object", AFFINE, "native", "an error")
    precious = tmp_path / "precious"
    precious.write_text("years")
    path.unlink()
    path.symlink_to(precious)
    assert crash_report.write(tmp_path, "object", AFFINE, "native", "an error") == path
    assert precious.read_text() == "years" and not path.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, precious]


def test_nobody_can_foresee_the_folder_of_reproducers(monkeypatch):
    """A link of the name that a process of this user would take is not followed."""
    monkeypatch.delenv("MOE_MLIR_REPRODUCER_DIR")
    code = """if True:
        import os, pathlib, tempfile
        from moe_mlir.compiler import crash_report
        temporary = pathlib.Path(tempfile.mkdtemp())
        elsewhere = pathlib.Path(tempfile.mkdtemp())
        tempfile.tempdir = str(temporary)
        (temporary / f"moe-mlir-{os.geteuid()}").symlink_to(elsewhere)
        folder = crash_report.folder()
        assert folder == crash_report.folder() and folder.parent == temporary
        assert not folder.is_symlink() and folder.stat().st_mode & 0o777 == 0o700
        print(folder.name)"""
    names = {python(code)[0] for _ in range(2)}
    assert len(names) == 2


def test_an_unwritable_folder_does_not_hide_the_error(moe, monkeypatch):
    monkeypatch.setenv("MOE_MLIR_REPRODUCER_DIR", "/proc/none")
    with pytest.raises(moe.MoeError, match="no file that reproduces this could be written"):
        jit.compile_cached("func.func @f( {")


# ------------------------------------------------------------------ phases


def test_the_page_shows_each_pass_with_its_difference(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MOE_MLIR_DUMP_DIR", str(tmp_path / "dumps"))
    jit.compile_cached(AFFINE)
    page = tmp_path / "phases.html"
    assert phases.main([str(tmp_path / "dumps"), "-o", str(page)]) == 0
    text = page.read_text()
    names = [p.name for p in sorted((tmp_path / "dumps").glob("*/*")) if p.suffix != ".o"]
    assert len(names) > 5 and all(name in text for name in names)
    assert f"{len(names)} phases" in capsys.readouterr().out
    assert "<ins>" in text and "<del>" in text
    assert "tensor&lt;?x4xf32&gt;" in text and not re.search(r"tensor<[^/]", text)
    assert "http" not in text, "the page stands alone"


def test_renumbered_values_are_no_difference():
    before = ["  %12 = arith.addf %arg0, %11 : f32", "  %13 = arith.mulf %12, %cst_3 : f32"]
    after = ["  %7 = arith.addf %arg0, %4 : f32", "  %8 = arith.mulf %7, %cst_1 : f32"]
    assert phases.compare(before, after) == []
    (head, *changes) = phases.compare(before, after[:1] + ["  %8 = arith.divf %7, %cst_1 : f32"])
    assert head[0] == "@"
    assert changes == [(" ", after[0]), ("-", before[1]), ("+", "  %8 = arith.divf %7, %cst_1 : f32")]


def test_another_language_is_not_compared(tmp_path):
    (tmp_path / "00-input.mlir").write_text("a\n")
    (tmp_path / "90-optimised.ll").write_text("b\n")
    (tmp_path / "notes.txt").write_text("not a phase")
    first, second = phases.read_phases(tmp_path)
    assert (first.name, second.name, second.changes) == ("00-input.mlir", "90-optimised.ll", [])
