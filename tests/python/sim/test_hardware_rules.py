"""What hardware gives and asks for at the edges: where shared memory starts and how much there is,
which lanes may store to one place, how mbarriers end, who is elected, how large a grid may be."""

import numpy as np
import pytest
from ptxlib import entry

from moe_mlir import sim

REGISTERS = {"s": "b32", "t": "b32", "v": "b32", "w": "b32", "bar": "b32", "out": "b64",
             "at": "b64", "p": "pred", "q": "pred"}
OUT = {"pout": "u64"}
LOAD_OUT = "ld.param.u64 out, [pout];"


def run(body, *, block=32, grid=1, words=64, shared="", target="sm_90a", **options):
    """The report of a kernel that has one buffer, and the buffer."""
    text = entry(OUT, REGISTERS, f"{LOAD_OUT}\n{body}", shared=shared)
    out = np.zeros(words, np.uint32)
    report = sim.launch(text.replace("sm_90a", target), "k", grid, block, [out], **options)
    return report, out


def kinds(body, *, seeds=range(6), **options):
    return {f.kind for seed in seeds for policy in (0, 1)
            for f in run(body, seed=seed, policy=policy, **options)[0].findings}


# ---------------------------------------------------------------- shared memory

DYNAMIC = ".extern .shared .align 16 .b8 dynamic[];"


@pytest.mark.parametrize("static", ["", ".shared .align 8 .b8 static[24];"])
def test_dynamic_shared_memory_starts_at_1024(static):
    text = entry(OUT, REGISTERS, f"""{LOAD_OUT}
        {"mov.u32 s, static; st.shared.u32 [s], s;" if static else ""}
        mov.u32 s, dynamic;
        st.shared.u32 [s], s;
        cvta.shared.u64 at, dynamic;
        cvt.u32.u64 t, at;
        st.global.u32 [out], s;
        st.global.u32 [out+4], t;""", shared=static)
    text = text.replace(".visible", DYNAMIC + "\n.visible")
    for alignment, expected in (("hardware", 0), ("declared", 16)):
        out = np.ones(2, np.uint32)
        report = sim.launch(text, "k", 1, 1, [out], dynamic_smem=64, smem_alignment=alignment)
        assert report.ok, str(report)
        assert (out[0] % 1024, out[1] % 1024) == (expected or 0, expected or 0) or static
        assert alignment == "declared" or not (out % 1024).any()


def test_between_static_and_dynamic_memory_is_nothing():
    body = """mov.u32 s, static; mov.u32 t, dynamic; st.shared.u32 [s], t;
        st.shared.u32 [t], t; st.shared.u32 [s+24], t;"""
    text = entry(OUT, REGISTERS, body, shared=".shared .align 8 .b8 static[24];")
    text = text.replace(".visible", DYNAMIC + "\n.visible")
    report = sim.launch(text, "k", 1, 1, [np.zeros(1, np.uint32)], dynamic_smem=64)
    assert [f.kind for f in report.findings] == ["bounds"]


@pytest.mark.parametrize("target, most", [("sm_80", 163), ("sm_89", 99), ("sm_90a", 227),
                                          ("sm_120", 99)])
def test_shared_memory_of_the_chip(target, most):
    assert run("", target=target, dynamic_smem=most * 1024)[0].ok
    with pytest.raises(ValueError, match=f"at most {most * 1024} bytes of shared memory on"):
        run("", target=target, dynamic_smem=most * 1024 + 1)


def test_more_than_48_kilobytes_ask_the_host():
    most = 48 * 1024
    static = ".shared .align 8 .b8 static[1024];"
    use = "mov.u32 s, static; st.shared.u32 [s], s;"
    assert run(use, shared=static, dynamic_smem=most - 1024, smem_opt_in=False)[0].ok
    assert run(use, shared=static, dynamic_smem=most, smem_opt_in=True)[0].ok
    with pytest.raises(ValueError, match="MAX_DYNAMIC_SHARED_SIZE_BYTES"):
        run(use, shared=static, dynamic_smem=most - 1023, smem_opt_in=False)
    large = f".shared .align 8 .b8 static[{most + 8}];"
    with pytest.raises(ValueError, match=f"at most {most} bytes of static shared memory"):
        run(use, shared=large)


@pytest.mark.parametrize("address", ["0xfffffffffffffffe", "0xfffffffc", "0x7ffffffffffffffc"])
@pytest.mark.parametrize("space", ["shared", "local", "param"])
def test_an_address_that_wraps_around_is_out_of_bounds(space, address):
    frame = ".local .align 8 .b8 frame[8];" if space == "local" else ".shared .b8 s8[64];"
    use = "" if space == "local" else "mov.u32 s, s8;"
    kind = "ld.param.u32 t, [at];" if space == "param" else f"st.{space}.u32 [at], t;"
    report, _ = run(f"{use} mov.u32 t, 1; mov.u64 at, {address}; {kind}", shared=frame, block=1,
                    checks=("bounds",))
    assert [f.kind for f in report.findings] == ["bounds"]


# ---------------------------------------------------------------- equal stores

WORD = ".shared .align 4 .b8 word[8];"


@pytest.mark.parametrize("place", ["mov.u32 s, word; st.shared.b32 [s], v;",
                                   "st.global.b32 [out], v;"])
def test_lanes_of_one_instruction_may_store_one_value(place):
    same = f"mov.u32 v, 7; {place}"
    assert not kinds(same, shared=WORD)
    assert "race" in kinds(f"mov.u32 v, %tid.x; {place}", shared=WORD)


def test_overlapping_stores_are_equal_byte_by_byte():
    """Lane l stores two words from word l on: what its neighbour has in its first one."""
    body = """mov.u32 t, %tid.x; shl.b32 w, t, 2; cvt.u64.u32 at, w; add.u64 at, at, out;
        and.b32 p32, t, 0; mov.u32 v, {};
        @p bra DONE; st.global.b32 [at], v; st.global.b32 [at+4], v; DONE:"""
    body = body.replace("and.b32 p32, t, 0;", "setp.eq.u32 p, t, 99;")
    assert not kinds(body.format("5").replace("st.global.b32 [at+4], v;", ""))
    vector = body.replace("st.global.b32 [at], v; st.global.b32 [at+4], v;",
                          "and.b32 w, t, 1; setp.eq.u32 q, w, 1; @q bra DONE;"
                          "st.global.v2.b32 [at], {v, v};")
    assert not kinds(vector.replace("{}", "5"))


@pytest.mark.parametrize("block, grid", [(64, 1), (32, 2)])
def test_equal_stores_of_two_warps_are_a_finding_of_their_own(block, grid):
    body = "mov.u32 v, 7; st.global.b32 [out], v;"
    assert kinds(body, block=block, grid=grid) == {"equal-stores"}
    assert not kinds(body, block=block, grid=grid, allow=("equal-stores",))
    assert "race" in kinds("mov.u32 v, %tid.x; mov.u32 w, %ctaid.x; mad.lo.u32 v, w, 32, v;"
                           "and.b32 v, v, 32; st.global.b32 [out], v;", block=block, grid=grid)


def test_equal_stores_to_shared_memory_can_be_let_pass_alone():
    allow = ("equal-shared-stores",)
    shared = "mov.u32 s, word; mov.u32 v, 7; st.shared.b32 [s], v;"
    assert kinds(shared, block=64, shared=WORD) == {"equal-stores"}
    assert not kinds(shared, block=64, shared=WORD, allow=allow)
    body = "mov.u32 v, 7; st.global.b32 [out], v;"
    assert kinds(body, block=64, allow=allow) == {"equal-stores"}


def test_a_race_of_lanes_names_two_lanes():
    report, _ = run("mov.u32 v, %tid.x; st.global.b32 [out], v;")
    (finding,) = report.findings
    assert f"lane {finding.lane} " not in finding.other + " "


@pytest.mark.parametrize("store, words", [
    ("st.global.b32 [out], v;", ("0x0000001f", "0x00000000")),
    ("st.global.v2.b32 [out], {w, v};", ("0x0000001f", "0x00000000")),
    ("st.global.b8 [out], v;", ("0x1f", "0x00"))])
def test_a_race_of_lanes_names_both_values(store, words):
    """Lanes 0 and 31 store their numbers; which one stays is undefined, and nothing else is."""
    ends = "mov.u32 v, %tid.x; mov.u32 w, 5; setp.ne.u32 p, v, 0; setp.ne.and.u32 p, v, 31, p;"
    report, _ = run(f"{ends} @p bra END; {store} END:")
    (finding,) = report.findings
    assert finding.kind == "race" and f"{words[finding.lane == 0]} to argument 0" in finding.message
    assert f"by the same instruction, {words[finding.lane == 31]}; one of the two stays" in (
        finding.message)


def test_lanes_of_two_warps_are_no_race_of_lanes():
    report, _ = run("mov.u32 v, %tid.x; st.global.b32 [out], v;", block=64)
    assert {"same warp" in f.message for f in report.findings} == {True, False}


# ---------------------------------------------------------------- mbarriers

TILE = ".shared .align 16 .b8 tile[64]; .shared .align 8 .b8 bars[16];"
COPY = """mov.u32 s, tile; mov.u32 bar, bars; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0;
@p bra END;
mbarrier.init.shared.b64 [bar], 1;
{fence}
mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [out], 64, [bar];
{then}
END:"""
FENCE = "fence.proxy.async;"
WAIT = """WAIT: mbarrier.try_wait.parity.shared.b64 q, [bar], 0; @!q bra WAIT;"""


@pytest.mark.parametrize("then", ["mbarrier.inval.shared.b64 [bar];",
                                  "mbarrier.inval.shared.b64 [bar];"
                                  "mbarrier.init.shared.b64 [bar], 1;"])
def test_an_mbarrier_that_ends_before_its_copy(then):
    """The copy held on to it: a use after free."""
    for seed in range(8):
        report, _ = run(COPY.format(fence=FENCE, then=then), shared=TILE, seed=seed)
        assert "race" in {f.kind for f in report.findings}, seed


def test_an_mbarrier_that_ends_after_its_copy():
    body = COPY.format(fence=FENCE, then=WAIT + "mbarrier.inval.shared.b64 [bar];")
    assert not kinds(body, shared=TILE)


def test_the_proxy_fence_after_an_initialisation_can_be_left_out_on_request():
    body = COPY.format(fence="", then=WAIT)
    assert kinds(body, shared=TILE) == {"race"}
    assert not kinds(body, shared=TILE, allow=("unfenced-init",))


@pytest.mark.parametrize("fence, clean", [(FENCE, True), ("", False)])
def test_a_copy_over_what_was_an_mbarrier(fence, clean):
    body = COPY.format(fence=f"""mbarrier.init.shared.b64 [s], 1;
        mbarrier.inval.shared.b64 [s]; {fence}""", then=WAIT)
    assert ("race" not in kinds(body, shared=TILE, allow=("unfenced-init",))) == clean


@pytest.mark.parametrize("count, clean", [(1, True), (2**20 - 1, True), (0, False),
                                          (2**20, False)])
def test_counts_of_mbarriers(count, clean):
    body = f"""mov.u32 bar, bars; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra END;
        mbarrier.init.shared.b64 [bar], {count}; END:"""
    assert kinds(body, shared=TILE, seeds=[0]) == (set() if clean else {"bounds"})


@pytest.mark.parametrize("expected, clean", [(2**20 - 1, True), (2**20, False)])
def test_bytes_that_mbarriers_wait_for(expected, clean):
    body = f"""mov.u32 bar, bars; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra END;
        mbarrier.init.shared.b64 [bar], 1;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {expected}; END:"""
    assert kinds(body, shared=TILE, seeds=[0]) == (set() if clean else {"bounds"})


def test_an_mbarrier_that_ends_before_an_arrival_of_copies():
    """The arrival held on to it: a use after free."""
    body = """mov.u32 s, tile; mov.u32 bar, bars; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra END;
        mbarrier.init.shared.b64 [bar], 1; cp.async.ca.shared.global [s], [out], 16;
        cp.async.mbarrier.arrive.noinc.shared.b64 [bar]; mbarrier.inval.shared.b64 [bar];
        mov.u32 v, 0; LOOP: add.u32 v, v, 1; setp.lt.u32 q, v, 9999; @q bra LOOP;
        cp.async.wait_all; END:"""
    assert "race" in kinds(body, shared=TILE)


# ---------------------------------------------------------------- warps and clusters

@pytest.mark.parametrize("code, found", [
    ("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", set()),
    ("barrier.cluster.wait.aligned;", {"deadlock"}),
    ("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
     "barrier.cluster.wait.aligned;", {"deadlock"}),
    ("barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;"
     "barrier.cluster.wait.aligned;", {"deadlock"}),
])
def test_arrivals_and_waits_of_a_cluster_alternate(code, found):
    assert kinds(code, grid=2, cluster=2, seeds=[0]) == found


def test_seeds_choose_who_is_elected():
    body = """elect.sync _|p, 0xffffffff; mov.u32 v, %tid.x; @p st.global.b32 [out], v;
        elect.sync _|q, 0xffffffff; @q st.global.b32 [out+4], v;"""
    leaders = set()
    for seed in range(16):
        report, out = run(body, seed=seed)
        assert report.ok and out[0] == out[1], "equal masks elect the same lane"
        leaders.add(int(out[0]))
    assert run(body)[1][0] == 0 and len(leaders) > 4


LOCK = """mov.u32 t, %tid.x; and.b32 t, t, 31; setp.ne.u32 p, t, 0; @p bra END;
TRY: atom.{order}.gpu.global.cas.b32 v, [out], 0, 1; setp.ne.u32 q, v, 0; @q bra TRY;
ld.global.u32 w, [out+4]; add.u32 w, w, 1; st.global.u32 [out+4], w;
atom.{order}.gpu.global.exch.b32 v, [out], 0;
END:"""


@pytest.mark.parametrize("block, grid", [(64, 1), (32, 3)])
@pytest.mark.parametrize("order, found", [("acq_rel", set()), ("relaxed", {"race"})])
def test_locks_contend(block, grid, order, found):
    assert kinds(LOCK.format(order=order), block=block, grid=grid, seeds=range(4)) == found


# ---------------------------------------------------------------- grids

LARGE = {"nonportable_cluster": True}

@pytest.mark.parametrize("grid", [(1, 65536), (1, 1, 65536)])
def test_grids_that_no_chip_has(grid):
    with pytest.raises(ValueError, match="grid of at most 2147483647,65535,65535 blocks"):
        run("", grid=grid)


@pytest.mark.parametrize("blocks, target, options, most", [
    (8, "sm_90a", {}, None), (16, "sm_90a", {}, 8), (16, "sm_90a", LARGE, None),
    (16, "sm_120a", LARGE, 8), (2, "sm_89", {}, "clusters begin with sm_90")])
def test_sizes_of_clusters(blocks, target, options, most):
    if most is None:
        assert run("", grid=blocks, cluster=blocks, target=target, **options)[0].ok
        return
    complaint = most if isinstance(most, str) else f"at most {most} blocks a cluster"
    with pytest.raises(ValueError, match=complaint):
        run("", grid=blocks, cluster=blocks, target=target, **options)


@pytest.mark.parametrize("bounds, cluster, complaint", [
    (".reqnctapercluster 2, 1, 1", None, None),
    (".reqnctapercluster 2, 1, 1", 2, None),
    (".reqnctapercluster 2, 1, 1", 4, "clusters of 2,1,1 as kernel k requires"),
    (".explicitcluster .maxclusterrank 4", 4, None),
    (".maxclusterrank 2", 4, "at most 2 blocks a cluster as kernel k declares"),
])
def test_clusters_that_the_kernel_declares(bounds, cluster, complaint):
    text = entry(OUT, REGISTERS, LOAD_OUT).replace("\n{\n", f"\n{bounds}\n{{\n", 1)
    launch = {"grid": 4, "block": 32, "args": [np.zeros(1, np.uint32)], "cluster": cluster}
    if complaint is None:
        assert sim.launch(text, "k", **launch).ok
        return
    with pytest.raises(ValueError, match=complaint):
        sim.launch(text, "k", **launch)


# ---------------------------------------------------------------- text

@pytest.mark.parametrize("text, complaint", [
    (".section .debug_info", "expected '{', found the end"),
    (".global .align 3 .b8 x[4];", "power of two"),
    (".global .align 0 .b8 x[4];", "power of two"),
    (".global .b8 x[99999999999999999999];", "at most 268435456 elements"),
    (".global .b64 x[65536][65536][65536][65536][65536];", "at most 268435456 elements"),
    (".global .b32 x[1] = " + "{" * 100000, "nested brackets"),
    (".entry k() { mov.u32 " + "[" * 100000, "nested brackets"),
    (".entry k() { .local .b8 x[1000000]; ret; }", "bytes of local memory"),
])
def test_text_that_no_compiler_writes_is_refused(text, complaint):
    with pytest.raises(sim.PtxError, match=complaint):
        sim.Module(f".version 8.0\n.target sm_90\n.address_size 64\n{text}")
