"""utils/old_libraries.py: programs of a new libstdc++ that run with an old one.

Its libraries of glibc need Zig, which the release's workflow installs (utils/build_wheel.sh).
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "utils"))

import old_libraries  # noqa: E402

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("g++", "readelf", "objdump"))),
                                reason="no g++ or no binutils")
# A constructor of GLIBCXX_3.4.26, from_chars of 3.4.29, a conversion of GCC_12, an object, a thread.
PROGRAM = r"""
#include <charconv>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
int main() {
  std::ostringstream out;
  out << 2.5;
  std::string text = std::move(out).str();
  double number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  volatile _Float16 half = number;
  number = half;
  std::thread([&] { std::cout << number << std::endl; }).join();
  try {
    new int[static_cast<long>(-number)];
  } catch (const std::bad_alloc &error) {
    std::cout << error.what() << std::endl;
  }
}
"""


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def versions(program):
    found = re.findall(r"(GLIBCXX|CXXABI|GCC)_([\d.]+)", run("objdump", "-T", program))
    return {name: max(tuple(map(int, number.split("."))) for one, number in found if one == name)
            for name in {one for one, _ in found}}


def test_a_program_asks_for_the_old_libstdcxx_alone(tmp_path):
    source = tmp_path / "program.cpp"
    source.write_text(PROGRAM)
    compiled = ["g++", "-std=c++20", source, "-pthread", "-o"]
    run(*compiled, tmp_path / "new")
    if versions(tmp_path / "new")["GLIBCXX"] <= old_libraries.NEWEST["GLIBCXX"]:
        pytest.skip("this libstdc++ is old itself")
    old = tmp_path / "old"
    old.mkdir()
    old_libraries.write_gcc(old, "g++")
    run(*compiled, tmp_path / "program", f"-L{old}", "-Wl,--exclude-libs,libstdc++.a")
    found = versions(tmp_path / "program")
    assert found["GLIBCXX"] <= old_libraries.NEWEST["GLIBCXX"]
    assert found["CXXABI"] <= old_libraries.NEWEST["CXXABI"]
    assert found["GCC"] <= old_libraries.NEWEST["GCC"]
    assert run(tmp_path / "program") == run(tmp_path / "new") == "2.5\nstd::bad_array_new_length\n"


def test_of_each_name_the_newest_version_that_is_old_enough():
    listing = """
     1: 0000000000001000    10 FUNC    GLOBAL DEFAULT   13 f@GLIBCXX_3.4
     2: 0000000000001010    10 FUNC    GLOBAL DEFAULT   13 f@GLIBCXX_3.4.11
     3: 0000000000001020    10 FUNC    GLOBAL DEFAULT   13 f@@GLIBCXX_3.4.29
     4: 0000000000001030    10 FUNC    WEAK   DEFAULT   13 g@@GLIBCXX_3.4.30
     5: 0000000000001040   272 OBJECT  GLOBAL DEFAULT   23 o@@GLIBCXX_3.4
     6: 0000000000000008     8 TLS     GLOBAL DEFAULT   22 t@@CXXABI_1.3
     7: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND malloc@GLIBC_2.2.5 (3)
"""
    assert old_libraries.old_symbols(listing) == {
        "f": ("GLIBCXX_3.4.11", "FUNC", 10), "o": ("GLIBCXX_3.4", "OBJECT", 272),
        "t": ("CXXABI_1.3", "TLS", 8)}


def test_without_zig_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(old_libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="expected Zig in this environment, found none: `pip install ziglang`"):
        old_libraries.zig()


@pytest.mark.parametrize("script", ["build_wheel.sh", "try_wheel.sh"])
def test_help_of_a_script_does_nothing_else(script):
    shown = run(ROOT / "utils" / script, "--help")
    assert f"utils/{script}" in shown and "wheel" in shown


def test_an_empty_system_needs_a_wheel_and_a_name():
    done = subprocess.run([ROOT / "utils" / "try_wheel.sh"], capture_output=True, text=True)
    assert done.returncode == 2 and "expected WHEEL SUITE" in done.stderr
