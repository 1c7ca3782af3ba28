"""Files that a reader of the repository looks for, and numbers that several of them state."""

import re
import tomllib
from pathlib import Path

import pytest

import moe_mlir

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = (ROOT / "CITATION.cff").read_text()


def first(pattern, path):
    return re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)[1]


def test_the_license_is_the_one_that_the_metadata_name():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0 WITH LLVM-exception"
    assert PROJECT["license"] in text and PROJECT["license"] in CITATION
    for part in ("TERMS AND CONDITIONS", "END OF TERMS AND CONDITIONS", "LLVM Exceptions to the"):
        assert part in text
    assert PROJECT["license-files"] == ["LICENSE", "THIRD_PARTY_NOTICES"]


@pytest.mark.parametrize("name, pattern", [
    ("CHANGELOG.md", r"^## \[([\d.]+)\]"),
    ("CITATION.cff", r"^version: ([\d.]+)$"),
    ("CMakeLists.txt", r"project\(moe-mlir VERSION ([\d.]+) "),
    ("pyproject.toml", r'^version = "([\d.]+)"$'),
    ("packages/moe_mlir_bench/pyproject.toml", r'^version = "([\d.]+)"$'),
    ("packages/moe_mlir_bench/pyproject.toml", r'^dependencies = \["moe-mlir==([\d.]+)"\]$'),
])
def test_the_version_is_the_same_in(name, pattern):
    assert first(pattern, name) == moe_mlir.__version__


def test_writer_loaders_and_page_have_the_same_artifact_formats():
    """That of decoders, and that of all others."""
    in_cpp = r"kFormatVersion = (\d+), kDecoderFormatVersion = (\d+);"
    places = {
        "lib/Target/Artifact.cpp": in_cpp,
        "lib/Runtime/Loader/Files.cpp": in_cpp,
        "python/moe_mlir/artifact/loading.py": r"_FORMAT_VERSIONS = \((\d+), (\d+)\)",
        "docs/Versions.md": r'"format_version"`, at present (\d+), and (\d+) for a decoder',
    }
    found = {re.search(pattern, (ROOT / path).read_text()).groups()
             for path, pattern in places.items()}
    assert len(found) == 1


def test_the_hosted_checks_run_what_contributors_run():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for command in re.findall(r"^ +run: (\./\S+)", workflow, re.MULTILINE):
        assert (ROOT / command).exists(), command
    page = (ROOT / "docs" / "Contributing.md").read_text()
    for command in ("./test", "utils/check_format.sh", "utils/check_tidy.sh"):
        assert command in workflow and command in page


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md",
                                  "README.md", "SECURITY.md"])
def test_links_of_a_file_at_the_top_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / target).exists(), target
