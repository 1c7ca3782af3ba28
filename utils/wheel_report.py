#!/usr/bin/env python3
"""What a wheel, or a folder that `cmake --install` wrote, holds and how large it is.

    python utils/wheel_report.py dist/moe_mlir-0.1.0-*.whl
    cmake --install build --prefix out/wheel --strip && python utils/wheel_report.py out/wheel
"""

import argparse
import pathlib
import sys
import zipfile
import zlib
from dataclasses import dataclass

KINDS = {
    "compiler (native module)": lambda p: p.name.startswith("_moe."),
    "libraries": lambda p: p.suffix == ".so",
    "tools": lambda p: p.parent.name == "bin",
    "headers": lambda p: p.suffix in (".h", ".def"),
    "for CMake and pkg-config": lambda p: p.suffix in (".cmake", ".pc"),
    "Python sources": lambda p: p.suffix == ".py" or p.name == "py.typed",
    "metadata": lambda p: ".dist-info" in p.parts[0],
    "other": lambda p: True,
}


@dataclass(frozen=True)
class Entry:
    path: pathlib.PurePath
    size: int
    packed: int

    @property
    def kind(self):
        return next(kind for kind, fits in KINDS.items() if fits(self.path))


def entries(source: pathlib.Path) -> list:
    """Every file of a wheel or of a folder; a folder's files are deflated to know."""
    if source.is_dir():
        found = []
        for path in sorted(p for p in source.rglob("*") if p.is_file()):
            data = path.read_bytes()
            found.append(Entry(path.relative_to(source), len(data), len(zlib.compress(data))))
        return found
    with zipfile.ZipFile(source) as wheel:
        return [Entry(pathlib.PurePosixPath(i.filename), i.file_size, i.compress_size)
                for i in wheel.infolist() if not i.is_dir()]


def table(found) -> str:
    rows = [("content", "files", "MB", "MB packed", "largest")]
    for kind in KINDS:
        group = [entry for entry in found if entry.kind == kind]
        if group:
            largest = max(group, key=lambda entry: entry.size)
            rows.append((kind, str(len(group)), _mb(e.size for e in group),
                         _mb(e.packed for e in group), largest.path.name))
    rows.append(("total", str(len(found)), _mb(e.size for e in found),
                 _mb(e.packed for e in found), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
             for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _mb(sizes):
    return f"{sum(sizes) / 1e6:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=pathlib.Path, help="a .whl file or a folder")
    source = parser.parse_args().source
    if not source.is_dir() and not zipfile.is_zipfile(source):
        print(f"error: expected a wheel or a folder, found neither at {source}", file=sys.stderr)
        return 1
    print(table(entries(source)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
