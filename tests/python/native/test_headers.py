"""The C headers are C, and complete on their own."""

import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[3] / "include"


@pytest.mark.parametrize("standard", ["c99", "c17"])
@pytest.mark.parametrize("header", ["MoE-c/Compiler.h", "MoE/Runtime/Parallel.h",
                                    "MoE/Runtime/Memory.h"])
def test_compiles_alone_as_c(tmp_path, header, standard):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "use.c"
    source.write_text(f'#include "{header}"\nint main(void) {{ return 0; }}\n')
    subprocess.run([compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-pedantic",
                    "-fsyntax-only", f"-I{INCLUDE}", source], check=True)
