"""Traces of shared memory, and the proofs that are read off them."""

import numpy as np
import pytest
from ptxlib import entry
from triton_kernels.traced import keeps_order

from moe_mlir import sim

REGISTERS = {"t": "b32", "at": "b32", "v": "b32", "out": "b64", "w": "b64", "p": "pred"}
BEGIN = """.shared .align 16 .b8 buffer[1024];
ld.param.u64 out, [pout]; mov.u32 t, %tid.x; mov.u32 at, buffer; mad.lo.u32 at, t, 4, at;
"""
END = """mul.wide.u32 w, t, 4; add.u64 w, w, out;
st.global.u32 [w], v;"""


def trace(body, **options):
    """(PTX, its events) of a block of 64 threads."""
    text = entry({"pout": "u64"}, REGISTERS, f"{BEGIN}{body}\n{END}")
    report = sim.launch(text, "k", 1, 64, [np.zeros(64, np.uint32)], trace_shared=True, **options)
    return text, report.shared_trace


def barriers(text):
    return [i for i, line in enumerate(text.split("\n"), 1) if "bar.sync" in line]


def test_a_trace_has_what_each_lane_touches():
    text, events = trace("st.shared.u32 [at], t;\nbar.sync 0;\nld.shared.u32 v, [at];")
    lines = {text.split("\n")[e.line - 1].split()[0] for e in events}
    assert lines == {"st.shared.u32", "bar.sync", "ld.shared.u32"}
    base = min(e.offset for e in events if e.kind)
    stores = {(e.warp, e.lane, e.offset - base, e.bytes) for e in events if e.kind == 2}
    assert stores == {(t // 32, t % 32, 4 * t, 4) for t in range(64)}
    assert sum(e.kind == 1 for e in events) == 64 and sum(e.kind == 0 for e in events) == 2


def test_no_trace_unless_asked_for():
    text = entry({"pout": "u64"}, REGISTERS, f"{BEGIN}st.shared.u32 [at], t;\nmov.u32 v, t;\n{END}")
    assert sim.launch(text, "k", 1, 64, [np.zeros(64, np.uint32)]).shared_trace == []


@pytest.mark.parametrize("offset, is_needed", [(0, False), (4, True), (128, True)])
def test_a_barrier_between_a_store_and_a_load(offset, is_needed):
    """A thread that loads what it has stored itself needs none."""
    text, events = trace("st.shared.u32 [at], t;\nst.shared.u32 [at+256], t;\nbar.sync 0;\n"
                         f"ld.shared.u32 v, [at+{offset}];")
    assert keeps_order(text, barriers(text)[0], events) != is_needed


def test_one_of_two_barriers_is_enough():
    text, events = trace("st.shared.u32 [at], t;\nst.shared.u32 [at+256], t;\nbar.sync 0;\n"
                         "bar.sync 0;\nld.shared.u32 v, [at+128];")
    assert all(keeps_order(text, line, events) for line in barriers(text))


@pytest.mark.parametrize("between, is_needed", [
    ("", True), ("shfl.sync.bfly.b32 v, v, 1, 31, -1;", False),
    ("shfl.sync.bfly.b32 v, t, 1, 31, -1;", True)])
def test_a_warp_overwrites_what_it_has_loaded(between, is_needed):
    """A shuffle of what the lanes have loaded waits for the loads of all."""
    text, events = trace("st.shared.u32 [at], t;\nbar.warp.sync -1;\nxor.b32 at, at, 4;\n"
                         f"ld.shared.u32 v, [at];\n{between}\nbar.sync 0;\nxor.b32 at, at, 4;\n"
                         "st.shared.u32 [at], t;", checks=())
    assert keeps_order(text, barriers(text)[0], events) != is_needed


def test_what_a_proof_does_not_know():
    text, events = trace("st.shared.u32 [at], t;\nbar.sync 0;\nld.shared.u32 v, [at];\n"
                         "bar.sync 1, 64;")
    assert not keeps_order(text, barriers(text)[0], events)
