#!/usr/bin/env python3
"""Libraries to link with, so that the result runs where glibc and libstdc++ are older than here.

    python utils/old_libraries.py build-old
    cmake -DMOE_OLD_LIBRARIES=build-old ..

The linker takes the newest version of each function that it finds: what is linked on a machine of
2023 asks for glibc 2.34. The folder has the startup code of glibc 2.28 and libraries that define
what it and libstdc++ of GCC 8 define, without code, as the standard manylinux_2_28 asks for. What
is newer in libstdc++ comes from its archive; what is newer in glibc is an error of the linker.

Those of glibc are made by Zig, which knows the functions of each version (`pip install ziglang`).
"""

import argparse
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

GLIBC = "2.28"
# The newest versions that manylinux_2_28 allows.
NEWEST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
LOADER = "ld-linux-x86-64.so.2"


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"error: `{' '.join(map(str, command))}` failed:\n{done.stderr}")
    return done.stdout


# ---- glibc ---------------------------------------------------------------------------


def zig() -> str:
    spec = importlib.util.find_spec("ziglang")
    if spec is None:
        sys.exit("error: expected Zig in this environment, found none: `pip install ziglang`")
    return str(pathlib.Path(spec.origin).parent / "zig")


def write_glibc(out: pathlib.Path, compiler: str) -> None:
    """Startup code and libraries, as Zig makes them to link a program."""
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder)
        (made / "main.c").write_text("int main(void) { return 0; }\n")
        environment = dict(os.environ, ZIG_GLOBAL_CACHE_DIR=folder, ZIG_LOCAL_CACHE_DIR=folder)
        for pie in ("-pie", "-no-pie"):  # Scrt1.o, crt1.o
            run(zig(), "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", pie, made / "main.c",
                "-o", made / "main", "-lm", "-ldl", "-lpthread", "-lrt", env=environment)
        wanted = {"Scrt1.o", "crt1.o", "libc_nonshared.a", "libld.so.2", *LIBRARIES}
        for path in made.rglob("*"):
            if path.name in wanted:
                shutil.copy(path, out / path.name.replace("libld.so.2", LOADER))
                wanted.discard(path.name)
    if wanted:
        sys.exit(f"error: expected {', '.join(sorted(wanted))} of Zig, found none; "
                 "ziglang 0.15.2 makes them")
    for name in LIBRARIES[1:]:
        link(out / name)
    write_newer(out / "libc_newer.a", compiler)
    # Threads and dlopen, which newer ones have in libc itself, come from libraries of their own.
    needed = " ".join([*LIBRARIES[2:], LOADER])
    (out / "libc.so").write_text(
        f"INPUT(libc.so.6 libc_nonshared.a libc_newer.a AS_NEEDED({needed}))\n")


def write_newer(archive: pathlib.Path, compiler: str) -> None:
    """What newer headers ask glibc for: whether there is one thread, which is never taken for so."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "newer.c"
        source.write_text('__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n')
        run(compiler, "-x", "c", "-c", "-fPIC", source, "-o", source.with_suffix(".o"))
        archive.unlink(missing_ok=True)
        run("ar", "rcs", archive, source.with_suffix(".o"))


def link(library: pathlib.Path) -> None:
    """libm.so for libm.so.6."""
    name = library.with_name(library.name.partition(".so")[0] + ".so")
    name.unlink(missing_ok=True)
    name.symlink_to(library.name)


# ---- libraries of GCC ----------------------------------------------------------------

# number: value size type binding visibility section name@version
_SYMBOL = re.compile(r"\s*\d+: \w+\s+(\w+) (FUNC|OBJECT|TLS|IFUNC)\s+\w+\s+DEFAULT\s+\d+ "
                     r"(\S+?)@@?((?:GLIBCXX|CXXABI|GCC)_[\d.]+)")
_SECTIONS = {"FUNC": ('.text', "@function"), "OBJECT": ('.bss,"aw",@nobits', "@object"),
             "TLS": ('.tbss,"awT",@nobits', "@tls_object")}


def number_of(version: str) -> tuple:
    return tuple(map(int, version.partition("_")[2].split(".")))


def old_symbols(listing: str) -> dict:
    """Of each name that has a version old enough the newest such, with type and size."""
    found = {}
    for match in map(_SYMBOL.match, listing.splitlines()):
        if match is None:
            continue
        size, kind, name, version = match.groups()
        if number_of(version) > NEWEST[version.partition("_")[0]]:
            continue
        if name not in found or number_of(found[name][0]) < number_of(version):
            kind = "FUNC" if kind == "IFUNC" else kind
            found[name] = version, kind, max(int(size, 0), 1)
    return found


def write_without_code(out: pathlib.Path, name: str, compiler: str) -> None:
    """The compiler's shared library `name`, of what an old one defines."""
    symbols = old_symbols(run("readelf", "-W", "--dyn-syms", path_of(name, compiler)))
    lines = []
    for number, (symbol, (version, kind, size)) in enumerate(sorted(symbols.items())):
        section, elf_type = _SECTIONS[kind]
        lines += [f".section {section}", f".globl s{number}", f".type s{number}, {elf_type}",
                  f".size s{number}, {size}", f"s{number}: .skip {size}",
                  f".symver s{number}, {symbol}@@{version}"]
    with tempfile.TemporaryDirectory() as folder:
        source, script = pathlib.Path(folder) / "old.s", pathlib.Path(folder) / "old.map"
        source.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))
        versions = sorted({version for version, _, _ in symbols.values()})
        script.write_text("".join(f"{version} {{}};\n" for version in versions) +
                          "LOCAL { local: s*; };\n")
        run(compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}",
            f"-Wl,--version-script={script}", source, "-o", out / name)


def path_of(name: str, compiler: str) -> pathlib.Path:
    return pathlib.Path(run(compiler, f"-print-file-name={name}").strip()).resolve()


def write_gcc(out: pathlib.Path, compiler: str) -> None:
    """libstdc++ and libgcc. What is newer comes from their archives, into what is linked."""
    write_without_code(out, "libstdc++.so.6", compiler)
    shutil.copy(path_of("libstdc++.a", compiler), out / "libstdc++.a")
    (out / "libstdc++.so").write_text("INPUT(libstdc++.so.6 libstdc++.a)\n")
    write_without_code(out, "libgcc_s.so.1", compiler)
    (out / "libgcc_s.so").write_text("INPUT(libgcc_s.so.1 -lgcc)\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="the folder to write")
    parser.add_argument("--compiler", default="g++", help="whose libraries (default: %(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_glibc(options.out, options.compiler)
    write_gcc(options.out, options.compiler)
    print(f"libraries of glibc {GLIBC} in {options.out}")


if __name__ == "__main__":
    main()
