"""Each folder says in a few lines who lives there, and the files that it names exist."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DATA = {"Inputs", "corpus", "hardware"}


def files():
    listed = subprocess.run(
        ["git", "ls-files", "lib", "include", "simulator", "tools", "python", "packages",
         "utils", "tests", "examples/README.md"], cwd=ROOT,
        capture_output=True, text=True, check=True).stdout.split()
    found = [Path(name) for name in listed if (ROOT / name).exists()]
    return [file for file in found if not DATA & set(file.parts)]


def folders():
    """Those with files, and those in which a reader has to choose between folders."""
    found = {file.parent for file in files()}
    above = {parent for folder in found for parent in folder.parents if parent != Path()}
    choices = {folder: {below for below in found | above if below.parent == folder}
               for folder in above}
    return sorted(found | {folder for folder, below in choices.items() if len(below) > 1})


def readmes():
    return [file for file in files() if file.name == "README.md"]


def named_files(text):
    """What looks like a file or a folder among the code spans."""
    spans = re.findall(r"`([^`\s]+)`", text)
    return [span for span in spans if re.search(r"/|\.(cpp|h|td|py|sh|md|txt)$", span)
            and not span.startswith("./")]


def exists(name, folder):
    """Below the root, the folder, the folder above, or the folder's headers."""
    pattern = re.sub(r"<\w+>", "*", name.removeprefix("../"))
    headers = "include/MoE" / folder.relative_to("lib") if folder.parts[0] == "lib" else folder
    return any(any((ROOT / base).glob(pattern)) for base in ("", folder, folder.parent, headers))


def test_every_folder_has_a_readme():
    assert len(folders()) > 60
    assert [str(folder) for folder in folders() if not (ROOT / folder / "README.md").exists()] == []


def test_readmes_are_short():
    lines = {file: (ROOT / file).read_text().count("\n") for file in readmes()}
    assert {file: count for file, count in lines.items() if count > 12} == {}


def test_what_they_name_exists():
    missing = [(str(file), name) for file in readmes()
               for name in named_files((ROOT / file).read_text())
               if not exists(name, file.parent)]
    assert missing == []
