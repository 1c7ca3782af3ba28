"""utils/check_torch.py, check_transformers.py and check_vllm.py, which run tests with other versions."""

import os
import pathlib
import subprocess
import sys

import pytest
from support import BUILD, forked_python

ROOT = pathlib.Path(__file__).parents[3]
PACKAGES = ("torch", "transformers", "vllm")


def check(package, *arguments, **variables):
    return subprocess.run(
        [sys.executable, ROOT / "utils" / f"check_{package}.py", *map(str, arguments)],
        env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tests_exist(package, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "utils"))
    tests = __import__(f"check_{package}").TESTS
    assert tests
    for test in tests:
        assert (ROOT / "tests" / "python" / test.partition("::")[0]).is_file(), test


# The two that the suite's own interpreter has: a fork of it takes its place.
@pytest.mark.parametrize("package", PACKAGES[:2])
def test_the_code_says_whether_all_versions_passed(package, tmp_path):
    passing, failing = tmp_path / "test_passing.py", tmp_path / "test_failing.py"
    passing.write_text("def test_it():\n    pass\n")
    failing.write_text("def test_it():\n    raise ValueError\n")
    python = forked_python()
    done = check(package, BUILD, python, "--", passing)
    assert done.returncode == 0 and "1 versions passed, 0 failed" in done.stdout, done.stderr
    done = check(package, BUILD, python, "--", failing)
    assert done.returncode == 1 and f"0 versions passed, 1 failed\n  {python}" in done.stdout


def test_what_cannot_be_installed_is_a_failure_and_leaves_nothing(tmp_path):
    done = check("transformers", tmp_path, "0.0.0", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path),
                 PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 1 and "transformers==0.0.0 cannot be installed" in done.stdout
    assert not (tmp_path / "versions" / "transformers-0.0.0").exists()


def test_without_arguments_it_says_how_it_is_called():
    done = check("transformers")
    assert done.returncode == 2 and "check_transformers.py BUILD_DIR WHICH" in done.stderr


def test_every_week_the_newest_are_run():
    workflow = (ROOT / ".github" / "workflows" / "versions.yml").read_text()
    assert f"package: [{', '.join(PACKAGES)}]" in workflow and "schedule:" in workflow
