"""A planted bug gives a message that a kernel's author can act on.

The kernels below carry `.loc` lines, so that a finding can name the source.
"""

import re

import numpy as np
import pytest

from moe_mlir import sim

HEAD = """.version 8.0
.target sm_90
.address_size 64
.file 1 "kernel.cu"

.visible .entry planted(.param .u64 px, .param .u64 po)
{
.reg .pred p, q;
.reg .b32 i, s, t, v, w;
.reg .b64 at, far, out;
.shared .align 16 .b8 tile[256];
.loc 1 10 3
mov.u32 i, %tid.x;
mul.wide.u32 far, i, 4;
ld.param.u64 at, [px];
ld.param.u64 out, [po];
add.u64 at, at, far;
add.u64 out, out, far;
mov.u32 s, tile;
shl.b32 t, i, 2;
add.u32 t, s, t;
mov.u32 v, 1;
"""
TAIL = "\nret;\n}\n"


def plant(body, *, block=64, grid=1, words=64, seeds=4, **options):
    """The findings of the first run that has any, and the text."""
    text = HEAD + body + TAIL
    for seed in range(seeds):
        for policy in (0, 1):
            x = np.arange(words, dtype=np.uint32)
            report = sim.launch(text, "planted", grid, block,
                                [x, np.zeros(words, np.uint32)], seed=seed,
                                policy=policy, **options)
            if not report.ok:
                return report, text
    pytest.fail("no finding")


def line_of(text, statement):
    return next(i for i, s in enumerate(text.split("\n"), 1)
                if s.strip() == statement)


def located(report, kind, text, statement, source):
    """The finding of this kind at this statement; its message says it all."""
    line = line_of(text, statement)
    found = [f for f in report.findings if f.kind == kind and f.line == line]
    assert found, f"no {kind} at line {line} in:\n{report}"
    f = found[0]
    assert f.kernel == "planted"
    assert f.source == source
    assert len(f.block) == 3 and f.warp >= 0 and f.lane >= 0
    for part in ("planted", f"line {line}", source, "block", "warp", "lane"):
        assert part in f.message, f"expected {part!r} in {f.message!r}"
    assert f.message in str(report)
    assert (f.kind, f.message) == tuple(f)
    return f


def test_race_between_warps_names_both_accesses():
    report, text = plant("""
.loc 1 20 3
st.shared.u32 [t], v;
xor.b32 i, i, 32;
shl.b32 t, i, 2;
add.u32 t, s, t;
.loc 1 23 7
ld.shared.u32 w, [t];
st.global.u32 [out], w;""")
    store = line_of(text, "st.shared.u32 [t], v;")
    load = line_of(text, "ld.shared.u32 w, [t];")
    races = [f for f in report.findings if f.kind == "race"]
    assert races, str(report)
    f = races[0]
    assert {f.line} <= {store, load}
    other = store if f.line == load else load
    assert f.source in ("kernel.cu:20", "kernel.cu:23")
    assert str(other) in f.other and str(other) in f.message
    assert "warp" in f.other and "lane" in f.other
    assert re.search(r"tile|shared", f.message)
    located(report, "race", text, text.split("\n")[f.line - 1], f.source)


def test_race_between_lanes_of_a_warp():
    report, text = plant("""
.loc 1 30 3
st.shared.u32 [t], v;
xor.b32 i, i, 1;
shl.b32 t, i, 2;
add.u32 t, s, t;
.loc 1 33 7
ld.shared.u32 w, [t];
st.global.u32 [out], w;""", block=32, words=32)
    races = [f for f in report.findings if f.kind == "race"]
    assert races and races[0].other, str(report)


def test_race_between_blocks():
    report, text = plant("""
mov.u32 w, %ctaid.x;
.loc 1 40 3
st.global.u32 [out], w;""", grid=2)
    f = located(report, "race", text, "st.global.u32 [out], w;",
                "kernel.cu:40")
    assert "block" in f.other


def test_out_of_bounds_names_the_allocation_and_the_distance():
    report, text = plant("""
.loc 1 50 5
st.global.u32 [out+4], v;""")
    f = located(report, "bounds", text, "st.global.u32 [out+4], v;",
                "kernel.cu:50")
    assert (f.warp, f.lane, f.block) == (1, 31, (0, 0, 0))
    assert "argument 1" in f.message and "256" in f.message


def test_shared_out_of_bounds():
    report, text = plant("""
.loc 1 55 5
st.shared.u32 [t+4], v;""")
    f = located(report, "bounds", text, "st.shared.u32 [t+4], v;",
                "kernel.cu:55")
    assert (f.warp, f.lane) == (1, 31)


def test_misaligned_access():
    report, text = plant("""
.loc 1 60 5
st.shared.u32 [t+2], v;""", words=64)
    f = located(report, "align", text, "st.shared.u32 [t+2], v;",
                "kernel.cu:60")
    assert "4" in f.message


def test_uninitialised_shared_memory():
    report, text = plant("""
.loc 1 70 5
ld.shared.u32 w, [t];
st.global.u32 [out], w;""")
    located(report, "uninit", text, "ld.shared.u32 w, [t];", "kernel.cu:70")


def test_uninitialised_register():
    """Reported where it matters, not where it is merely passed on."""
    report, text = plant("""
.loc 1 75 5
add.u32 v, w, 1;
.loc 1 76 5
st.global.u32 [out], v;""")
    located(report, "uninit", text, "st.global.u32 [out], v;", "kernel.cu:76")


def test_deadlock_names_where_everybody_waits():
    report, text = plant("""
setp.lt.u32 p, i, 32;
@p bra HERE;
.loc 1 80 3
bar.sync 1;
bra DONE;
HERE:
.loc 1 83 3
bar.sync 2;
DONE:
st.global.u32 [out], v;""")
    (f,) = [f for f in report.findings if f.kind == "deadlock"][:1]
    one, two = (line_of(text, f"bar.sync {i};") for i in (1, 2))
    assert f.line in (one, two)
    assert str(one) in f.message and str(two) in f.message, f.message


def test_barrier_that_some_lanes_skip():
    report, text = plant("""
setp.lt.u32 p, i, 40;
@p bra LATER;
.loc 1 86 3
bar.sync 1;
LATER:
.loc 1 88 3
bar.sync 2;
st.global.u32 [out], v;""")
    (f,) = [f for f in report.findings if f.kind == "deadlock"][:1]
    one, two = (line_of(text, f"bar.sync {i};") for i in (1, 2))
    assert str(one) in f.message and str(two) in f.message, f.message


def test_wait_that_nobody_answers_ends():
    report, text = plant("""
.loc 1 90 3
SPIN: ld.volatile.global.u32 w, [at];
setp.ne.u32 p, w, 12345;
@p bra SPIN;""")
    assert report.findings[0].kind == "deadlock", str(report)


def test_copy_that_nobody_waits_for():
    report, text = plant("""
.loc 1 95 3
cp.async.ca.shared.global [t], [at], 4;
cp.async.commit_group;
.loc 1 97 3
ld.shared.u32 w, [t];
st.global.u32 [out], w;""")
    located(report, "race", text, "ld.shared.u32 w, [t];", "kernel.cu:97")


def test_copy_in_flight_at_the_end():
    report, text = plant("""
.loc 1 99 3
cp.async.ca.shared.global [t], [at], 4;
cp.async.commit_group;""")
    lines = {line_of(text, "cp.async.ca.shared.global [t], [at], 4;"),
             line_of(text, "ret;")}
    assert {f.line for f in report.findings} & lines, str(report)


def test_shuffle_from_an_absent_lane_gives_no_usable_value():
    """Reading it is legal, relying on it is not: it must not look right."""
    out = np.zeros(32, np.uint32)
    sim.launch(HEAD + """
setp.lt.u32 p, i, 16;
@!p bra DONE;
shfl.sync.bfly.b32 w, v, 16, 31, 0x0000ffff;
st.global.u32 [out], w;
DONE:""" + TAIL, "planted", 1, 32, [np.zeros(32, np.uint32), out])
    assert (out[:16] != 1).all()


def test_collective_without_the_lane_that_runs_it():
    report, text = plant("""
.loc 1 105 3
shfl.sync.bfly.b32 w, v, 1, 31, 0x7fffffff;
st.global.u32 [out], w;""", block=32, words=32)
    line = line_of(text, "shfl.sync.bfly.b32 w, v, 1, 31, 0x7fffffff;")
    found = [f for f in report.findings if f.line == line]
    assert found and "mask" in found[0].message, str(report)


def test_write_to_read_only_memory():
    x = np.arange(64, dtype=np.uint32)
    x.flags.writeable = False
    report = sim.launch(HEAD + "st.global.u32 [at], v;" + TAIL, "planted", 1,
                        64, [x, np.zeros(64, np.uint32)])
    assert [f.kind for f in report.findings] == ["bounds"], str(report)
    assert x[0] == 0


def test_one_bug_is_one_finding():
    report, _ = plant(".loc 1 50 5\nst.global.u32 [out+256], v;")
    bounds = [f for f in report.findings if f.kind == "bounds"]
    assert len(bounds) == 1 and bounds[0].count == 64


def test_host_threads_change_neither_findings_nor_counters():
    # Every block races, reads what nothing wrote, and steps out of bounds.
    body = HEAD + """
ld.shared.u32 w, [t];
st.shared.u32 [t], v;
xor.b32 i, i, 32;
shl.b32 t, i, 2;
add.u32 t, s, t;
ld.shared.u32 w, [t];
st.global.u32 [out+252], w;""" + TAIL
    reports = [
        sim.launch(body, "planted", 24, 64,
                   [np.zeros(64, np.uint32), np.zeros(4, np.uint32)],
                   seed=3, policy=1, threads=threads)
        for threads in (1, 2, 2, 2)
    ]
    first = reports[0]
    assert {f.kind for f in first.findings} == {"race", "uninit", "bounds"}
    assert first.findings == sorted(first.findings, key=lambda f: f.line)
    for report in reports[1:]:
        assert str(report) == str(first)
        assert report.counters == first.counters
        assert [f.count for f in report.findings] == \
            [f.count for f in first.findings]


def test_a_fault_that_the_launch_does_not_reach_is_not_reported():
    body = """
setp.gt.u32 p, i, 1000;
@!p bra DONE;
st.global.u32 [out+4096], v;
DONE:
st.global.u32 [out], v;"""
    report = sim.launch(HEAD + body + TAIL, "planted", 1, 64,
                        [np.zeros(64, np.uint32), np.zeros(64, np.uint32)])
    assert report.ok, str(report)


def test_checks_can_be_switched_off():
    body = "\nst.global.u32 [out], w;" + TAIL  # w was never written
    args = [np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
    assert not sim.launch(HEAD + body, "planted", 1, 64, args).ok
    assert sim.launch(HEAD + body, "planted", 1, 64, args,
                      checks=("race", "bounds", "align")).ok


def test_every_unknown_instruction_is_listed():
    text = HEAD + "frobnicate.u32 v, w;\nst.global.u32 [out], v;\n" \
        "quux.sync v;" + TAIL
    with pytest.raises(sim.PtxError) as caught:
        sim.Module(text)
    message = str(caught.value)
    for name in ("frobnicate", "quux"):
        assert name in message
        number = next(i for i, s in enumerate(text.split("\n"), 1)
                      if s.startswith(name))
        assert str(number) in message


@pytest.mark.parametrize("change, complaint", [
    (dict(kernel="absent"), "planted"),
    (dict(args=[1]), "expected 2 arguments"),
    (dict(block=2048), "1024"),
    (dict(policy=7), "policy"),
    (dict(checks=("races",)), "race"),
])
def test_wrong_launches_say_what_was_expected(change, complaint):
    x = np.zeros(64, np.uint32)
    launch = dict(kernel="planted", grid=1, block=64, args=[x, x.copy()])
    launch |= change
    with pytest.raises(ValueError, match=complaint):
        sim.launch(HEAD + TAIL, launch.pop("kernel"), launch.pop("grid"),
                   launch.pop("block"), launch.pop("args"), **launch)
