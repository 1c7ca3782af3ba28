"""The reference of C++ headers has what the libraries export, and what it says of it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import PACKAGE

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs" / "reference" / "cpp").glob("*.md"))
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

import headers  # noqa: E402

MARKS = [name for page in PAGES if page.name != "README.md"
         for name in headers.MARK.findall(page.read_text())]
# Protected: for functions of an artifact alone, which derive from Function.
OF_DERIVED_CLASSES = {"Function::verifyArguments", "Function::verifyCall"}


def flat(entries, outer=""):
    """(qualified name, entry) of all entries and their members."""
    for entry in entries:
        name = name_of(entry)
        yield outer + name, entry
        yield from flat(entry.members, f"{outer}{name}::")


def name_of(entry):
    if entry.kind == "function":
        return re.search(r"(~?\w+|operator[^\w\s]+)\s*\(", entry.declaration)[1]
    if entry.kind in ("class", "struct", "enum", "enum-class", "enumerator"):
        return re.match(r"\w+", entry.declaration)[0]
    return re.search(r"(\w+)(\[.*\])?$", entry.declaration.partition(" =")[0])[1] \
        if entry.kind == "member" else entry.declaration


def shown():
    return [found for name in MARKS for found in flat(headers.read_header(name)[1])]


def exported(library):
    """The functions that a library of ours exports, as `Artifact::getFunction` and `moe_call`."""
    listed = subprocess.run(["nm", "-D", "--defined-only", "-C", library], capture_output=True,
                            text=True, check=True).stdout
    found = re.findall(r"^\w+ T (?:moe::\w+::)?([\w:~]+|[\w:]+operator=)(?:\[abi:cxx11\])?(?:\(.*)?$",
                       listed, re.MULTILINE)
    return {name for name in found if "::" in name or not name.startswith("std")}


@pytest.mark.parametrize("library", ["libmoe_runtime.so", "libmoe_torch.so"])
def test_every_exported_function_has_an_entry(library):
    if shutil.which("nm") is None or not (PACKAGE / library).exists():
        pytest.skip(f"needs binutils' nm, and {library}, which is built where torch is at hand")
    names = {name for name, _ in shown()}
    functions = exported(PACKAGE / library)
    assert "loadKernels" in functions if "torch" in library else {
        "Artifact::getFunction", "Decoder::run", "moe_call", "getByteSize"} <= functions
    assert functions - OF_DERIVED_CLASSES - names == set()


def test_every_header_that_is_installed_is_on_one_page():
    wanted = [str(path.relative_to(headers.INCLUDE)) for folder in ("Runtime", "Torch")
              for path in (headers.INCLUDE / "MoE" / folder).glob("*.h")]
    assert len(wanted) >= 9 and len(MARKS) == len(set(MARKS))
    assert set(wanted) <= set(MARKS)


def test_every_public_function_and_class_says_what_it_does():
    silent = [name for name, entry in shown() if not entry.comment
              and entry.kind in ("function", "class", "struct", "enum", "enum-class", "type")]
    for name in silent[:]:
        outer, _, last = name.rpartition("::")
        # Destructors, moves and plain constructors do what the language says.
        if last.startswith("~") or last == "operator=" or last == outer.rpartition("::")[2]:
            silent.remove(name)
    assert silent == []


HEADER = """\
//===- Example.h - Something ------------------------------------*- C++ -*-===//
//
// What it is for.
//
//   int x = first(1);
//
//===----------------------------------------------------------------------===//

#ifndef EXAMPLE_H
#define EXAMPLE_H

namespace a::b {

class Later;

/// Counts `things`
/// twice.
class MOE_RUNTIME_EXPORT Counter : public Base {
public:
  /// Begins.
  explicit Counter(int start, std::vector<int> more = {1, 2})
      : start(start) {
    if (start) { call(); }
  }
  int get() const { return start; } // the sum
  int first, second;
  static constexpr int kSizes[2] = {1, 2};

protected:
  void hidden();

private:
  struct Inner { int y; };
  int start;
};

// Not shown as a comment of what follows.
enum class Kind { One = 1, /// the first
  Two };

/// Of a paragraph apart.

template <typename T>
T make(const std::string &text = "a;b{");

} // namespace a::b

extern "C" {
/// In C.
const char *name(void (*call)(int), int x);
}
#endif
"""


def test_a_header_is_read_as_a_compiler_would():
    entries = headers.Reader().read(HEADER)
    found = [(name, entry.kind, " ".join(entry.comment)) for name, entry in flat(entries)]
    assert found == [
        ("Counter", "class", "Counts `things` twice."), ("Counter::Counter", "function", "Begins."),
        ("Counter::get", "function", "the sum"), ("Counter::first", "member", ""),
        ("Counter::second", "member", ""), ("Counter::kSizes", "member", ""),
        ("Kind", "enum-class", ""), ("Kind::One", "enumerator", "the first"), ("Kind::Two", "enumerator", ""),
        ("make", "function", ""), ("name", "function", "In C.")]
    counter, kind, make, name = entries
    assert counter.declaration == "Counter : public Base" and counter.namespace == "a::b"
    assert counter.members[0].declaration == \
        "explicit Counter(int start, std::vector<int> more = {1, 2})"
    assert make.declaration == 'template <typename T> T make(const std::string &text = "a;b{")'
    assert name.declaration == "const char *name(void (*call)(int), int x)" and not name.namespace


def test_the_top_of_a_header_becomes_text_and_code():
    lines = headers.comment_as_rst(headers.top_comment(HEADER))
    assert lines == ["What it is for.", "", "", ".. code-block:: cpp", "", "    int x = first(1);"]
