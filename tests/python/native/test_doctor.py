"""The environment report."""

import os

from moe_mlir import cache
from moe_mlir.doctor import doctor


def test_names_what_a_bug_report_needs(moe):
    report = doctor()
    for fact in ("moe-mlir", "python", "compiler", "cpu", "ptxas", "cache", "LLVM mapped"):
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
