"""Litmus tests: what orders two accesses, and what only seems to.

A writer publishes data through a flag, a reader looks at the flag once and
reads the data if it is set. An ordered pair is never a finding; an unordered
one is a race in some schedule, even though the value is right in all of them.
"""

import numpy as np
import pytest
from ptxlib import entry

from moe_mlir import sim

SEEDS = 12


def findings(writer, reader, *, grid, block, extra=""):
    """Kinds that were found over the schedules. The first block (of a grid) or
    warp (of one block) runs `writer`, the last one `reader`."""
    who, mask = ("%ctaid.x", -1) if grid > 1 else ("%tid.x", -32)
    last = grid - 1 if grid > 1 else block - 32
    text = entry(
        {"pdata": "u64", "pflag": "u64", "pout": "u64"},
        {"data": "b64", "flag": "b64", "out": "b64", "me": "b32", "t": "b32",
         "sd": "b32", "sf": "b32", "seen": "b32", "v": "b32", "w": "b32",
         "p": "pred", "q": "pred", "first": "pred"},
        f"""
ld.param.u64 data, [pdata];
ld.param.u64 flag, [pflag];
ld.param.u64 out, [pout];
mov.u32 sd, shared_data;
mov.u32 sf, shared_flag;
mov.u32 me, {who};
and.b32 me, me, {mask};
mov.u32 t, %tid.x;
mov.u32 w, 0;
mov.u32 v, 42;
setp.ne.u32 p, t, 0;
@p bra INIT;
st.shared.u32 [sf], w;
INIT:
bar.sync 0;
and.b32 t, t, 31;
setp.eq.u32 first, t, 0;
setp.eq.u32 p, me, 0;
@p bra WRITER;
setp.eq.u32 p, me, {last};
@p bra READER;
{extra}
bra END;
WRITER:
{writer}
bra END;
READER:
{reader}
END:""",
        shared=".shared .align 4 .b8 shared_data[4];\n"
               ".shared .align 4 .b8 shared_flag[4];")
    module = sim.Module(text)
    kinds, values = set(), set()
    for seed in range(SEEDS):
        for policy in (0, 1):
            data, flag, out = (np.zeros(1, np.uint32) for _ in range(3))
            report = module.launch("k", grid, block, [data, flag, out],
                                   seed=seed, policy=policy)
            kinds |= {f.kind for f in report.findings}
            values.add(int(out[0]))
    if "st.global.u32 [out], w" in reader and not kinds:
        assert 42 in values, "no schedule let the reader see the flag"
        assert values <= {0, 42}
    return kinds


READ = "setp.eq.u32 p, seen, 1; @!p bra END; {} ld.global.u32 w, [data];" \
    " st.global.u32 [out], w;"
WRITE = "st.global.u32 [data], v; mov.u32 seen, 1; {}"

PUBLISH = {
    # name: (writer's way to set the flag, reader's way to see it, ordered?)
    "release and acquire": (
        "st.release.gpu.global.u32 [flag], seen;",
        "ld.acquire.gpu.global.u32 seen, [flag];", "", True),
    "system scope": (
        "st.release.sys.global.u32 [flag], seen;",
        "ld.acquire.sys.global.u32 seen, [flag];", "", True),
    "relaxed store": (
        "st.relaxed.gpu.global.u32 [flag], seen;",
        "ld.acquire.gpu.global.u32 seen, [flag];", "", False),
    "relaxed load": (
        "st.release.gpu.global.u32 [flag], seen;",
        "ld.relaxed.gpu.global.u32 seen, [flag];", "", False),
    "fences": (
        "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [flag], seen;",
        "ld.relaxed.gpu.global.u32 seen, [flag];", "fence.acq_rel.gpu;", True),
    "sequential fences": (
        "fence.sc.gpu; st.relaxed.gpu.global.u32 [flag], seen;",
        "ld.relaxed.gpu.global.u32 seen, [flag];", "fence.sc.gpu;", True),
    "fence on the writer only": (
        "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [flag], seen;",
        "ld.relaxed.gpu.global.u32 seen, [flag];", "", False),
    "fence on the reader only": (
        "st.relaxed.gpu.global.u32 [flag], seen;",
        "ld.relaxed.gpu.global.u32 seen, [flag];", "fence.acq_rel.gpu;",
        False),
    "fence and acquire": (
        "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [flag], seen;",
        "ld.acquire.gpu.global.u32 seen, [flag];", "", True),
    "fence after the flag": (
        "st.relaxed.gpu.global.u32 [flag], seen; fence.acq_rel.gpu;",
        "ld.relaxed.gpu.global.u32 seen, [flag];", "fence.acq_rel.gpu;",
        False),
    "membar and volatile": (
        "membar.gl; st.volatile.global.u32 [flag], seen;",
        "ld.volatile.global.u32 seen, [flag];", "membar.gl;", True),
    "volatile alone": (
        "st.volatile.global.u32 [flag], seen;",
        "ld.volatile.global.u32 seen, [flag];", "", False),
    "release by reduction, acquire by atomic": (
        "red.release.gpu.global.add.u32 [flag], 1;",
        "atom.acquire.gpu.global.or.b32 seen, [flag], 0;", "", True),
    "atomics of both orders": (
        "atom.acq_rel.gpu.global.exch.b32 seen, [flag], 1;",
        "atom.acq_rel.gpu.global.cas.b32 seen, [flag], 1, 2;", "", True),
    "relaxed atomics": (
        "atom.relaxed.gpu.global.exch.b32 seen, [flag], 1;",
        "atom.relaxed.gpu.global.or.b32 seen, [flag], 0;", "", False),
    "relaxed atomics and fences": (
        "fence.acq_rel.gpu; atom.relaxed.gpu.global.exch.b32 seen, [flag], 1;",
        "atom.relaxed.gpu.global.or.b32 seen, [flag], 0;",
        "fence.acq_rel.gpu;", True),
    "atomics without a word on order": (
        "atom.global.exch.b32 seen, [flag], 1;",
        "atom.global.or.b32 seen, [flag], 0;", "", False),
    "plain flag": (
        "st.global.u32 [flag], seen;", "ld.global.u32 seen, [flag];", "",
        False),
}

# The same within a block: the scope may be the block, too.
BLOCK_SCOPE = {
    "release and acquire for the block": (
        "st.release.cta.global.u32 [flag], seen;",
        "ld.acquire.cta.global.u32 seen, [flag];", "", True),
    "fences for the block": (
        "fence.acq_rel.cta; st.relaxed.cta.global.u32 [flag], seen;",
        "ld.relaxed.cta.global.u32 seen, [flag];", "fence.acq_rel.cta;", True),
    "membar for the block": (
        "membar.cta; st.volatile.global.u32 [flag], seen;",
        "ld.volatile.global.u32 seen, [flag];", "membar.cta;", True),
}


def cases(table, flip=None):
    return [pytest.param(w, r, f, ok if flip is None else flip, id=name)
            for name, (w, r, f, ok) in table.items()]


def judge(kinds, ordered):
    assert kinds == (set() if ordered else {"race"})


@pytest.mark.parametrize("write, read, fence, ordered",
                         cases(PUBLISH) + cases(BLOCK_SCOPE, flip=False))
def test_between_blocks(write, read, fence, ordered):
    judge(findings(WRITE.format(write), read + READ.format(fence), grid=2,
                   block=1), ordered)


@pytest.mark.parametrize("write, read, fence, ordered",
                         cases(PUBLISH) + cases(BLOCK_SCOPE))
def test_between_warps(write, read, fence, ordered):
    one = "@!first bra END; "
    judge(findings(one + WRITE.format(write), one + read + READ.format(fence),
                   grid=1, block=64), ordered)


@pytest.mark.parametrize("write, read, ordered", [
    ("st.release.cta.shared.u32 [sf], seen;",
     "ld.acquire.cta.shared.u32 seen, [sf];", True),
    ("membar.cta; st.volatile.shared.u32 [sf], seen;",
     "ld.volatile.shared.u32 seen, [sf]; membar.cta;", True),
    ("membar.cta; atom.shared.exch.b32 seen, [sf], 1;",
     "atom.shared.or.b32 seen, [sf], 0; membar.cta;", True),
    ("st.volatile.shared.u32 [sf], seen;",
     "ld.volatile.shared.u32 seen, [sf];", False),
    ("atom.shared.exch.b32 seen, [sf], 1;",
     "atom.shared.or.b32 seen, [sf], 0;", False),
])
def test_shared_memory_between_warps(write, read, ordered):
    one = "@!first bra END; "
    judge(findings(
        one + "st.shared.u32 [sd], v; mov.u32 seen, 1;" + write,
        one + read + "setp.eq.u32 p, seen, 1; @!p bra END;"
        "ld.shared.u32 w, [sd]; st.global.u32 [out], w;",
        grid=1, block=64), ordered)


def test_data_written_after_the_flag():
    judge(findings(
        "mov.u32 seen, 1; st.release.gpu.global.u32 [flag], seen;"
        "st.global.u32 [data], v;",
        "ld.acquire.gpu.global.u32 seen, [flag];" + READ.format(""), grid=2,
        block=1), False)


@pytest.mark.parametrize("middle, ordered", [
    # An atomic in between continues the release sequence...
    ("atom.relaxed.gpu.global.cas.b32 w, [flag], 1, 2;", True),
    # ...a plain relaxed store of another thread heads none.
    ("ld.relaxed.gpu.global.u32 w, [flag]; setp.eq.u32 p, w, 1; @!p bra END;"
     "mov.u32 w, 2; st.relaxed.gpu.global.u32 [flag], w;", False),
    # Passed on by somebody who acquired it.
    ("ld.acquire.gpu.global.u32 w, [flag]; setp.eq.u32 p, w, 1; @!p bra END;"
     "mov.u32 w, 2; st.release.gpu.global.u32 [flag], w;", True),
])
def test_through_a_third_block(middle, ordered):
    judge(findings(
        WRITE.format("st.release.gpu.global.u32 [flag], seen;"),
        "ld.acquire.gpu.global.u32 seen, [flag];"
        "setp.eq.u32 p, seen, 2; @!p bra END;"
        "ld.global.u32 w, [data]; st.global.u32 [out], w;",
        grid=3, block=1, extra=middle), ordered)


@pytest.mark.parametrize("write, read, ordered", [
    ("st.shared.u32 [sd], v; bar.arrive 1, 64;",
     "bar.sync 1, 64; ld.shared.u32 w, [sd];", True),
    ("st.shared.u32 [sd], v; bar.sync 1, 64;",
     "bar.sync 1, 64; ld.shared.u32 w, [sd];", True),
    ("st.shared.u32 [sd], v; bar.sync 1, 64;",  # arriving acquires nothing
     "bar.arrive 1, 64; ld.shared.u32 w, [sd];", False),
    ("bar.arrive 1, 64; st.shared.u32 [sd], v;",
     "bar.sync 1, 64; ld.shared.u32 w, [sd];", False),
])
def test_named_barriers(write, read, ordered):
    write = write.replace("st.shared", "@first st.shared")
    kinds = findings(write, read + "@first st.global.u32 [out], w;", grid=1,
                     block=64)
    if ordered:
        assert not kinds
    else:
        assert "race" in kinds  # and the value may not be there yet


@pytest.mark.parametrize("one, other, ordered", [
    ("ld.global.u32 w, [data];", "ld.global.u32 w, [data];", True),
    ("st.global.u32 [data], v;", "ld.global.u32 w, [data];", False),
    ("st.global.u32 [data], me;", "st.global.u32 [data], me;", False),
    ("red.global.add.u32 [data], 1;", "red.global.max.u32 [data], 1;", True),
    ("red.global.add.u32 [data], 1;", "ld.global.u32 w, [data];", False),
    ("red.global.add.u32 [data], 1;", "ld.relaxed.gpu.global.u32 w, [data];",
     True),
    ("red.global.add.u32 [data], 1;", "st.global.u32 [data], v;", False),
    ("red.cta.global.add.u32 [data], 1;", "red.global.add.u32 [data], 1;",
     False),
    ("st.relaxed.gpu.global.u32 [data], v;",
     "st.relaxed.gpu.global.u32 [data], v;", True),
    ("st.volatile.global.u32 [data], v;", "ld.volatile.global.u32 w, [data];",
     True),
    ("st.global.u8 [data], v;", "st.global.u8 [data+1], v;", True),
    ("st.global.u16 [data+2], v;", "ld.global.u16 w16, [data];", True),
    ("st.global.u8 [data+1], v;", "ld.global.u32 w, [data];", False),
])
def test_two_accesses_of_two_blocks(one, other, ordered):
    def narrow(code):
        if "16" in code or "u8" in code:
            return ("{ .reg .b16 w16; .reg .b16 v16; mov.u16 v16, 1; "
                    + code.replace(", v;", ", v16;") + " }")
        return code

    judge(findings(narrow(one), narrow(other), grid=2, block=1), ordered)


# --- asynchronous copies ------------------------------------------------------

COPY = """
{{ .shared .align 16 .b8 tile[256]; .shared .align 8 .b8 bar[8];
.reg .b32 to, b, x; .reg .b64 from;
mov.u32 to, tile; mov.u32 b, bar; mov.u32 x, %tid.x;
setp.eq.u32 q, x, 0; setp.lt.u32 p, x, 4;
{} }}
"""


def copy_findings(code):
    text = entry({"pin": "u64", "pout": "u64"},
                 {"in": "b64", "out": "b64", "v": "b32", "w": "b32",
                  "t": "b32", "p": "pred", "q": "pred", "r": "pred"},
                 "ld.param.u64 in, [pin]; ld.param.u64 out, [pout];"
                 + COPY.format(code))
    module = sim.Module(text)
    kinds = set()
    for seed in range(SEEDS):
        for policy in (0, 1):
            report = module.launch(
                "k", 1, 64, [np.ones(64, np.uint32), np.zeros(64, np.uint32)],
                seed=seed, policy=policy)
            kinds |= {f.kind for f in report.findings}
    return kinds


LANE_COPY = """mul.wide.u32 from, x, 16; add.u64 from, from, in;
shl.b32 t, x, 4; add.u32 t, t, to; @p cp.async.cg.shared.global [t], [from], 16;
"""
READ_WORD = """shl.b32 t, x, 2; and.b32 t, t, 63; add.u32 t, t, to;
ld.shared.u32 w, [t]; """
INIT = """@q mbarrier.init.shared.b64 [b], 1;
@q fence.mbarrier_init.release.cluster; bar.sync 0; """
LOAD = """@q mbarrier.arrive.expect_tx.shared.b64 _, [b], 64;
@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
[to], [in], 64, [b]; """
WAIT = """SPIN: mbarrier.try_wait.parity.shared.b64 r, [b], 0; @!r bra SPIN; """
FILL = """shl.b32 t, x, 2; and.b32 t, t, 63; add.u32 t, t, to; mov.u32 v, 7;
setp.lt.u32 p, x, 16; @p st.shared.u32 [t], v; """
STORE = """@q cp.async.bulk.global.shared::cta.bulk_group [out], [to], 64;
@q cp.async.bulk.commit_group; """


@pytest.mark.parametrize("code, clean", [
    pytest.param(*case, id=name) for name, case in {
        "copy, wait, barrier": (
            LANE_COPY + "cp.async.wait_all; bar.sync 0;" + READ_WORD, True),
        "the wait is of the copying thread alone": (
            LANE_COPY + "cp.async.wait_all;" + READ_WORD, False),
        "a barrier is no wait": (
            LANE_COPY + "cp.async.commit_group; bar.sync 0;" + READ_WORD
            + "cp.async.wait_all;", False),
        "a wait for all but one group": (
            LANE_COPY + "cp.async.commit_group; cp.async.wait_group 1;"
            "bar.sync 0;" + READ_WORD + "cp.async.wait_all;", False),
        "a later empty group": (
            LANE_COPY + "cp.async.commit_group; cp.async.commit_group;"
            "cp.async.wait_group 1; bar.sync 0;" + READ_WORD, True),
        "reuse before the wait": (
            LANE_COPY + "bar.sync 0;" + FILL + "cp.async.wait_all;", False),
        "bulk load and wait": (INIT + LOAD + WAIT + READ_WORD, True),
        "bulk load without a wait": (
            INIT + LOAD + READ_WORD + WAIT, False),
        "bulk load into what others still read": (
            INIT + FILL + "bar.sync 0;" + READ_WORD + LOAD + WAIT, False),
        "bulk load over a finished read": (
            INIT + FILL + "bar.sync 0;" + READ_WORD
            + "fence.proxy.async; bar.sync 0;" + LOAD + WAIT, True),
        "bulk load over the barrier's absence": (LOAD + WAIT, False),
        "bulk store": (
            FILL + "fence.proxy.async; bar.sync 0;" + STORE
            + "cp.async.bulk.wait_group 0;", True),
        "bulk store without a proxy fence": (
            FILL + "bar.sync 0;" + STORE + "cp.async.bulk.wait_group 0;",
            False),
        "bulk store without a barrier": (
            FILL + "fence.proxy.async;" + STORE
            + "cp.async.bulk.wait_group 0;", False),
        "source written again too early": (
            FILL + "fence.proxy.async; bar.sync 0;" + STORE + FILL
            + "cp.async.bulk.wait_group 0;", False),
        "source written again after the reads": (
            FILL + "fence.proxy.async; bar.sync 0;" + STORE
            + "cp.async.bulk.wait_group.read 0; bar.sync 0;" + FILL
            + "cp.async.bulk.wait_group 0;", True),
        "result read after the reads only": (
            FILL + "fence.proxy.async; bar.sync 0;" + STORE
            + "cp.async.bulk.wait_group.read 0; @q ld.global.u32 w, [out];"
            "cp.async.bulk.wait_group 0;", False),
        "result read after the wait": (
            FILL + "fence.proxy.async; bar.sync 0;" + STORE
            + "cp.async.bulk.wait_group 0; @q ld.global.u32 w, [out];", True),
    }.items()])
def test_copies(code, clean):
    kinds = copy_findings(code)
    assert bool(kinds) != clean, kinds
