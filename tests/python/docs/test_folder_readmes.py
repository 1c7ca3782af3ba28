"""Each folder says in a few lines who lives there, and the files that it names exist."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DATA = {"Inputs", "corpus", "hardware"}


def folders():
    listed = subprocess.run(
        ["git", "ls-files", "lib", "include", "simulator", "tools", "python", "packages",
         "utils", "tests"], cwd=ROOT,
        capture_output=True, text=True, check=True).stdout.split()
    found = {Path(name).parent for name in listed if (ROOT / name).exists()}
    return sorted(folder for folder in found if not DATA & set(folder.parts))


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
    lines = {folder: (ROOT / folder / "README.md").read_text().count("\n") for folder in folders()}
    assert {folder: count for folder, count in lines.items() if count > 12} == {}


def test_what_they_name_exists():
    missing = [(str(folder), name) for folder in folders()
               for name in named_files((ROOT / folder / "README.md").read_text())
               if not exists(name, folder)]
    assert missing == []
