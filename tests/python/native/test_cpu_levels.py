"""Right results, and no call that nobody defines, for CPUs from 2003 to today's."""

import ctypes
import os
import pathlib
import struct
import subprocess
from unittest import mock

import cpu_level_ops
import cpus
import pytest
from support import run_python

QUICK = "skylake-avx512"
RUN = ("x86-64", "x86-64-v2", "x86-64-v3", "skylake-avx512", "icelake-server", "native")
OURS = {"moe_get_num_threads", "moe_parallel_for", "_mlir_memref_to_llvm_alloc",
        "_mlir_memref_to_llvm_free"}


def marked(levels, quick):
    """All but `quick` are for long runs: each takes half a minute."""
    return [cpu if cpu == quick else pytest.param(cpu, marks=pytest.mark.long) for cpu in levels]


@pytest.fixture(scope="module")
def shared_cache():
    """That of the whole run, while each test here has one of its own."""
    from moe_mlir.compiler import cache

    return cache.open_default()


def environment(cpu, store):
    """Of a process for a CPU, which keeps what it compiles for the next run."""
    return {**os.environ, "MOE_MLIR_CPU": cpu,
            **({"MOE_MLIR_CACHE_DIR": str(store.folder)} if store else {})}


@pytest.mark.parametrize("cpu", marked(RUN, quick=QUICK))
def test_every_op_gradient_and_type_is_right(cpu, shared_cache):
    if cpu not in cpus.runnable():
        pytest.skip(f"this machine does not run code for {cpu}")
    result = run_python(cpu_level_ops.__file__, env=environment(cpu, shared_cache), timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr


# Tests of what depends on the width of vectors, beside the ops: panels, products, experts. What is
# left out is of models as a whole, or the same kernels in other dtypes and forms.
WIDTH_TESTS = ("models/test_packing.py", "models/test_packing_linears.py",
               "models/test_packed_weight.py", "ops/test_packed_experts.py",
               "ops/test_run_experts.py", "native/test_products.py")
WIDTH_SELECTION = """not compile and not artifact and not threads and not opcheck and not meta
    and not interrupted and (not dtype or swiglu or none or mixtral or rows)"""


@pytest.mark.drawn(2)
@pytest.mark.parametrize("file", WIDTH_TESTS)
@pytest.mark.parametrize("cpu", ["x86-64-v3", "skylake-avx512"])
def test_packing_products_and_experts(cpu, file, shared_cache):
    """16 columns a panel, and 64: what a size means depends on that."""
    if cpu not in cpus.runnable():
        pytest.skip(f"this machine does not run code for {cpu}")
    folder = pathlib.Path(__file__).parents[1]
    result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k",
                        " ".join(WIDTH_SELECTION.split()), folder / file,
                        env=environment(cpu, shared_cache), timeout=600)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr


@pytest.fixture(scope="module")
def every_kernel():
    """Recorded on the CPU for which another test here has compiled half of them."""
    cpu = QUICK if QUICK in cpus.runnable() else "native"
    with mock.patch.dict(os.environ, MOE_MLIR_CPU=cpu):
        return cpu_level_ops.record()


@pytest.mark.parametrize("cpu", marked(cpus.LEVELS, quick="x86-64"))
def test_objects_call_only_what_every_process_has(every_kernel, shared_cache, cpu):
    symbols = undefined_symbols(object_for(every_kernel, cpu, shared_cache))
    libraries = [ctypes.CDLL(name) for name in ("libc.so.6", "libm.so.6")]
    foreign = {s for s in symbols - OURS if not any(hasattr(lib, s) for lib in libraries)}
    assert "moe_parallel_for" in symbols
    assert not foreign


def object_for(text: str, cpu: str, store) -> bytes:
    """The object of a module, from an earlier run of the tests if the compiler is the same."""
    from moe_mlir._native import native
    from moe_mlir.compiler import cache
    from moe_mlir.compiler.code_id import compiler_id

    key = cache.make_key("object for a level", text, cpu, compiler_id())
    if (found := store.load(key)) is None:
        found = native().compile_object(text, cpu=cpu)
        store.store(key, found)
    return found


def undefined_symbols(elf: bytes) -> set:
    """The names that a relocatable object for 64 bits leaves to others."""
    (sections_at,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + size * i) for i in range(count)]
    symtab, table = 2, None
    for header in headers:
        if header[1] == symtab:
            table, names = header, headers[header[6]]
    assert table, "expected a table of symbols"
    found = set()
    for at in range(table[4], table[4] + table[5], 24):
        name, _, _, section = struct.unpack_from("<IBBH", elf, at)
        if section == 0 and name:
            start = names[4] + name
            found.add(elf[start : elf.index(b"\0", start)].decode())
    return found


def test_the_reader_of_symbols_finds_one_that_nobody_defines(tmp_path):
    source, target = tmp_path / "f.c", tmp_path / "f.o"
    source.write_text("float somewhere_else(float); float f(float x) { return somewhere_else(x); }")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-c", source, "-o", target], check=True)
    assert "somewhere_else" in undefined_symbols(pathlib.Path(target).read_bytes())
