"""`moe config`: where C++ programs find the runtime's headers, library and package files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .._support.command_line import Parser, add_json, print_json
from .._support.paths import PACKAGE

# Folder by folder: its option, what the option prints, and a file that is in it.
_OPTIONS = {
    "cmake_dir": ("the folder for CMake's -DMoERuntime_DIR=", "MoERuntimeConfig.cmake"),
    "include_dir": ("the folder for the compiler's -I", "MoE/Runtime/Artifact.h"),
    "library_dir": ("the folder for the linker's -L", "libmoe_runtime.so"),
    "pkg_config_dir": ("the folder for PKG_CONFIG_PATH", "moe-runtime.pc"),
}


def folders() -> dict[str, Path]:
    """Where the files of the runtime are: in the package of a wheel, else in the build tree."""
    if (PACKAGE / "include").is_dir():
        include, package_files = PACKAGE / "include", PACKAGE / "lib"
    else:
        # The package in a build tree is links to the sources.
        include = Path(__file__).resolve().parents[3] / "include"
        package_files = PACKAGE.parents[1] / "lib"
    return {"cmake_dir": package_files / "cmake" / "MoERuntime", "include_dir": include,
            "library_dir": PACKAGE, "pkg_config_dir": package_files / "pkgconfig"}


def parser() -> Parser:
    parser = Parser("config", "Prints where C++ programs find the runtime that runs artifacts: all "
                    "folders, or one.", examples=(
                        'cmake -S . -B build -DMoERuntime_DIR="$(moe config --cmake-dir)"',
                        'PKG_CONFIG_PATH="$(moe config --pkg-config-dir)" pkg-config --libs moe-runtime',
                        'g++ -std=c++20 -I "$(moe config --include-dir)" -c route.cpp'))
    only = parser.add_mutually_exclusive_group()
    for name, (what, _) in _OPTIONS.items():
        only.add_argument(f"--{name.replace('_', '-')}", dest="only", action="store_const",
                          const=name, help=f"print {what}")
    add_json(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    found = folders()
    wanted = [options.only] if options.only else list(found)
    for name in wanted:
        file = found[name] / _OPTIONS[name][1]
        if not file.exists():
            print(f"moe config: error: expected {file}, found none; install the moe-mlir wheel again, "
                  "or build the source tree", file=sys.stderr)
            return 1
    if options.json:
        print_json({name: str(found[name]) for name in wanted})
    elif options.only:
        print(found[options.only])
    else:
        width = max(map(len, found))
        for name in wanted:
            print(f"{name.replace('_', '-'):<{width}}  {found[name]}")
    return 0
