"""Barriers with reductions, register operands, and arrival counts."""

import numpy as np
import pytest
from ptxlib import entry, evaluate

from moe_mlir import sim


@pytest.mark.parametrize("policy", [0, 1])
def test_barrier_reductions(policy):
    x = np.random.default_rng(0).integers(0, 2, 96).astype(np.uint32)
    count, every, some = evaluate(
        "setp.ne.u32 p, $1, 0; bar.red.popc.u32 $0, 0, p;"
        "bar.red.and.pred q, 1, p; selp.u32 $01, 1, 0, q;"
        "bar.red.or.pred q, 2, !p; selp.u32 $02, 1, 0, q;",
        (np.uint32,) * 3, x, block=96, policy=policy)
    assert (count == x.sum()).all()
    assert (every == 0).all() and (some == 1).all()


@pytest.mark.parametrize("form", [
    "bar.sync t0, t1;", "barrier.sync t0, t1;", "barrier.cta.sync t0, t1;",
    "barrier.sync.aligned t0, t1;"])
@pytest.mark.parametrize("seed", range(3))
def test_barrier_id_and_count_in_registers(form, seed):
    """Warps 0 and 2, 1 and 3 exchange values; each pair has its barrier."""
    x = np.arange(128, dtype=np.uint32) * 3
    out = np.zeros(128, np.uint32)
    text = entry(
        {"px": "u64", "po": "u64"},
        {"at": "b64", "far": "b64", "t0": "b32", "t1": "b32", "i": "b32",
         "s": "b32", "v": "b32"},
        "mov.u32 i, %tid.x; mul.wide.u32 far, i, 4; ld.param.u64 at, [px];"
        "add.u64 at, at, far; ld.global.b32 v, [at]; mov.u32 s, tile;"
        "shl.b32 t0, i, 2; add.u32 t0, s, t0; st.shared.b32 [t0], v;"
        "shr.u32 t0, i, 5; and.b32 t0, t0, 1; add.u32 t0, t0, 3;"
        f"mov.u32 t1, 64; {form}"
        "xor.b32 i, i, 64; shl.b32 t0, i, 2; add.u32 t0, s, t0;"
        "ld.shared.b32 v, [t0]; ld.param.u64 at, [po]; add.u64 at, at, far;"
        "st.global.b32 [at], v;",
        shared=".shared .align 4 .b8 tile[512];")
    report = sim.launch(text, "k", 1, 128, [x, out], seed=seed, policy=1)
    assert report.ok, str(report)
    assert np.array_equal(out, x[np.arange(128) ^ 64])


def test_warp_barrier_orders_shared_accesses():
    x = np.arange(32, dtype=np.uint32) + 5
    got = evaluate(
        "{ .shared .align 4 .b8 tile[128]; mov.u32 t0, tile;"
        "mov.u32 t1, %laneid; shl.b32 t1, t1, 2; add.u32 t2, t0, t1;"
        "st.shared.b32 [t2], $1; bar.warp.sync -1; xor.b32 t1, t1, 124;"
        "add.u32 t2, t0, t1; ld.shared.b32 $0, [t2]; }", np.uint32, x,
        policy=1)
    assert np.array_equal(got, x[::-1])


@pytest.mark.parametrize("branch, policy", [
    (b, p) for b in ("mbarrier.try_wait", "mbarrier.test_wait") for p in (0, 1)
])
def test_mbarrier_phases(branch, policy):
    """Four rounds of "everybody adds one, everybody reads the sum"."""
    out = evaluate(
        "{ .shared .align 8 .b8 bar[8]; .shared .align 4 .b8 sum[4];"
        ".reg .b64 state; mov.u32 t0, bar; mov.u32 t1, sum; mov.u32 t2, %tid.x;"
        "setp.ne.u32 p, t2, 0; @p bra READY; mov.u32 t3, 0;"
        "mbarrier.init.shared.b64 [t0], 64; st.shared.u32 [t1], t3;"
        "READY: bar.sync 0; mov.u32 t3, 0; mov.u32 $0, 0;"
        "LOOP: atom.shared.add.u32 t2, [t1], 1;"
        "mbarrier.arrive.shared.b64 state, [t0];"
        f"SPIN: {branch}.shared.b64 q, [t0], state; @!q bra SPIN;"
        "ld.shared.u32 t2, [t1]; add.u32 $0, $0, t2;"
        "mbarrier.arrive.shared.b64 state, [t0];"
        f"SPUN: {branch}.shared.b64 q, [t0], state; @!q bra SPUN;"
        "add.u32 t3, t3, 1; setp.lt.u32 q, t3, 4; @q bra LOOP; }",
        np.uint32, np.zeros(64, np.uint32), block=64, policy=policy)
    assert (out == 64 * (1 + 2 + 3 + 4)).all()


def test_mbarrier_counts_and_drops():
    """One arrival of two, one that leaves for good: the next phase needs one
    arrival less."""
    out = evaluate(
        "{ .shared .align 8 .b8 bar[8]; .reg .b64 state; mov.u32 t0, bar;"
        "mov.u32 t1, %laneid; mov.u32 $0, 0; setp.ne.u32 p, t1, 0;"
        "@p bra DONE; mbarrier.init.shared.b64 [t0], 4;"
        "mbarrier.arrive.shared.b64 state, [t0], 2;"
        "mbarrier.arrive_drop.shared.b64 state, [t0];"
        "mbarrier.test_wait.shared.b64 q, [t0], state;"
        "selp.u32 t2, 1, 0, q; add.u32 $0, $0, t2;"
        "mbarrier.arrive.shared.b64 state, [t0];"
        "mbarrier.test_wait.shared.b64 q, [t0], state;"
        "selp.u32 t2, 10, 0, q; add.u32 $0, $0, t2;"
        "mbarrier.arrive.shared.b64 state, [t0], 3;"
        "mbarrier.test_wait.shared.b64 q, [t0], state;"
        "selp.u32 t2, 100, 0, q; add.u32 $0, $0, t2;"
        "mbarrier.inval.shared.b64 [t0];"
        "DONE: }", np.uint32, np.zeros(32, np.uint32))
    assert out[0] == 110
