"""Kernels on small stacks, and without memory: an error, never a signal."""

import subprocess
import sys
import textwrap

PRELUDE = """
import resource, threading
import torch
import moe_mlir

torch.set_num_threads(1)
"""


def run(code):
    result = subprocess.run([sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
                            capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, (result.returncode, result.stdout + result.stderr)


def test_large_buffers_fit_a_small_stack():
    """The rows of a block of queries, and the choice scores of a block of tokens, take megabytes."""
    run("""
        u, e = torch.randn(1, 40, 20000) / 200, torch.rand(1, 40, 8)
        z, bias = torch.randn(40, 30000), torch.zeros(30000)

        def work():
            return *moe_mlir.similarity_inform(u, e, causal=True), *moe_mlir.grouped_topk(z, 2, bias=bias)

        expected, found = work(), []
        threading.stack_size(512 << 10)
        thread = threading.Thread(target=lambda: found.extend(work()))
        thread.start()
        thread.join()
        assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))
    """)


def test_a_kernel_without_memory_is_a_memory_error():
    """Its buffers follow the number of tokens; the process may have little more than it has."""
    run("""
        # More than is kept of freed buffers.
        x, groups = torch.randn(33 << 22, 1), torch.zeros(33 << 22, dtype=torch.int32)
        expected = moe_mlir.mad_dispersion(x, groups, 4)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        for _ in range(3):  # the first call that fails is replayed, too
            resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), hard))
            try:
                moe_mlir.mad_dispersion(x, groups, 4)
            except MemoryError as error:
                assert "bytes of memory for a kernel, found none free" in str(error)
            else:
                raise AssertionError("expected too little memory")
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
            found = moe_mlir.mad_dispersion(x, groups, 4)
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
    """)


def test_buffers_are_kept_for_the_next_call():
    """Each page that a system gives anew is cleared first, which costs more than most work on it."""
    run("""
        x, groups = torch.randn(12 << 20, 1), torch.zeros(12 << 20, dtype=torch.int32)
        expected = moe_mlir.mad_dispersion(x, groups, 4)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        found = [moe_mlir.mad_dispersion(x, groups, 4) for _ in range(3)]
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        # The buffer takes 48 MiB, which malloc gives back at once.
        assert pages * resource.getpagesize() < 48 << 20, pages
        assert all(torch.equal(a, b) for result in found for a, b in zip(result, expected))
    """)
