"""The scripts in the root say what they do before they install anything."""

import functools
import os
import pathlib
import re
import subprocess

import pytest
from support import run_python

ROOT = pathlib.Path(__file__).parents[3]
PARSERS = {"run": ["-m", "moe_mlir_bench.demo"], "bench": ["-m", "moe_mlir_bench.bench"],
           "test": [str(ROOT / "utils/run_tests.py")]}


def _options(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - {"--help"}


@functools.cache
def _parsed_options(script):
    return _options(run_python(*PARSERS[script], "--help", check=True).stdout)


@pytest.mark.parametrize("script", PARSERS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_option_and_installs_nothing(script, flag, tmp_path):
    environment = {**os.environ, "MOE_MLIR_VENV": str(tmp_path / "venv"),
                   "MOE_MLIR_BUILD": str(tmp_path / "build")}
    shown = subprocess.run([ROOT / script, flag], env=environment, capture_output=True, text=True,
                           check=True)
    assert list(tmp_path.iterdir()) == [] and shown.stderr == ""
    assert _options(shown.stdout) == _parsed_options(script)
