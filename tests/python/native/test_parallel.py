"""The parallel loop of compiled kernels, called through its C interface."""

import collections
import ctypes
import threading
from pathlib import Path

import pytest

BODY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@pytest.fixture(scope="module")
def library(moe):
    with open("/proc/self/maps") as maps:
        paths = {Path(line.split()[-1]) for line in maps if "libmoe_runtime" in line}
    (path,) = paths  # one copy, whoever loaded it
    library = ctypes.CDLL(str(path))
    library.moe_parallel_for.argtypes = [ctypes.c_int64, BODY, ctypes.c_void_p]
    library.moe_parallel_for.restype = None
    yield library
    library.moe_set_num_threads(0)


def run(library, count, threads, inside=None):
    """The ranges that the body was given, and the thread that each ran on."""
    library.moe_set_num_threads(threads)
    owners, lock = {}, threading.Lock()

    @BODY
    def body(begin, end, context):
        with lock:
            owners[begin, end] = threading.get_native_id()
        if inside:
            inside()

    library.moe_parallel_for(count, body, None)
    return sorted(owners), owners


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 1000, 2**62 + 1])
def test_chunks_cover_the_range_once(library, count, threads):
    ranges, _ = run(library, count, threads)
    assert ranges[0][0] == 0 and ranges[-1][1] == count
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
    assert all(begin < end for begin, end in ranges)
    sizes = [end - begin for begin, end in ranges]
    assert len(ranges) <= min(count, 2 * threads) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("count", [14, 21, 100, 1000])
def test_growing_work_is_dealt_out_evenly(library, count, threads):
    _, owners = run(library, count, threads)
    work = collections.Counter()
    for (begin, end), owner in owners.items():
        work[owner] += sum(range(begin, end))
    # Chunks differ by one iteration, of which the last is the longest.
    assert len(work) == min(count, threads)
    assert max(work.values()) - min(work.values()) <= 2 * count


@pytest.mark.parametrize("count", [0, -1, -(2**63)])
def test_an_empty_range_runs_nothing(library, count):
    assert run(library, count, 2) == ([], {})


def test_uses_several_threads(library):
    _, owners = run(library, 4, 4)
    assert len(set(owners.values())) == 4


def test_one_iteration_stays_in_the_calling_thread(library):
    _, owners = run(library, 1, 4)
    assert set(owners.values()) == {threading.get_native_id()}


def test_a_nested_loop_runs_in_its_own_thread(library):
    nested = []

    def inside():
        @BODY
        def body(begin, end, context):
            nested.append((begin, end))

        library.moe_parallel_for(10, body, None)

    ranges, _ = run(library, 2, 2, inside)
    assert len(ranges) == 2
    assert nested == [(0, 10), (0, 10)]
