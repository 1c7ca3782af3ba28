"""The environment report."""

import os

from moe_mlir import doctor
from moe_mlir.compiler import cache


def test_names_what_a_bug_report_needs(moe):
    report = doctor()
    for fact in ("moe-mlir", "python", "torch", "transformers", "backend", "compiler", "cpu", "ptxas",
                 "CUDA driver", "tools", "libraries", "cache", "variables", "LLVM mapped"):
        assert report.facts[fact]
    assert report.facts["compiler"].startswith("LLVM 22.1.8")
    assert report.facts["cpu"].startswith(moe.host_cpu()[0])
    assert "libLLVM" in report.facts["LLVM mapped"]
    assert str(cache.default_folder()) in report.facts["cache"]
    assert report.problems == []


def test_reports_an_unsafe_cache():
    folder = cache.default_folder()
    folder.mkdir()
    os.chmod(folder, 0o777)
    report = doctor()
    assert any("chmod 700" in problem for problem in report.problems)
    assert "problem: " in str(report)


def test_reports_variables_that_mean_nothing(monkeypatch):
    monkeypatch.setenv("MOE_MLIR_CACHEDIR", "x")
    monkeypatch.setenv("MOE_MLIR_PROGRESS", "0")
    report = doctor()
    assert any("did you mean MOE_MLIR_CACHE_DIR?" in problem for problem in report.problems)
    assert "MOE_MLIR_PROGRESS=0" in report.facts["variables"]


def test_reports_tools_that_are_missing(monkeypatch):
    monkeypatch.setattr("moe_mlir._support.tools.TOOLS", ("moe-opt", "moe-nothing"))
    report = doctor()
    assert report.facts["tools"] == "1 of 2"
    assert any("expected moe-nothing with" in problem for problem in report.problems)


def test_reports_a_torch_that_is_too_old(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    assert any("expected torch 2.11 or newer, found 2.4.1" in p for p in doctor().problems)
