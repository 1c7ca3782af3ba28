"""wgmma is one instruction of four warps, and reads its registers when it likes."""

import numpy as np
import pytest
from ptxlib import entry
from test_wgmma import IMAGE, image

from moe_mlir import sim

N, K = 8, 16
REGISTERS = {"at": "b64", "x": "b64", "da": "b64", "db": "b64", "t": "b32", "w": "b32", "to": "b32",
             "v": "b32", "p": "pred", "q": "pred",
             **{f"{r}{i}": "b32" for r in "de" for i in range(4)},
             **{f"a{i}": "b32" for i in range(4)}}
D = "{d0, d1, d2, d3}"
ISSUE = (f"wgmma.mma_async.sync.aligned.m64n{N}k{K}.f32.f16.f16 {{d}}, {{a}}, {{b}}, "
         "{scale}, 1, 1, {tail};")
FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
WARP = "shr.u32 w, t, 5;"


def wgmma(d=D, a="da", b="db", scale="q"):
    return ISSUE.format(d=d, a=a, b=b, scale=scale, tail="0, 0" if a == "da" else "0")


def launch(code, block=128, first=0, base=0, seed=0, policy=0):
    """A and B are 64 x 16 and 8 x 16 halves behind each other, 128B-swizzled, from `first` on."""
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (64, K)).astype(np.float16)
    b = rng.integers(-4, 5, (N, K)).astype(np.float16)
    body = ["mov.u32 t, %tid.x;", "setp.eq.u32 q, 0, 0;", "setp.lt.u32 p, t, 128;"]
    for param, variable in (("pa", "tile_a"), ("pb", "tile_b")):
        body += [f"ld.param.u64 at, [{param}];", f"mov.u32 to, {variable};",
                 "shl.b32 v, t, 2; add.u32 to, to, v; cvt.u64.u32 x, v; add.u64 at, at, x;"]
        for i in range(IMAGE // 512):
            body.append(f"@p ld.global.b32 v, [at+{512 * i}]; @p st.shared.b32 [to+{512 * i}], v;")
    for descriptor, variable in (("da", "tile_a"), ("db", "tile_b")):
        bits = 1 << 62 | 64 << 32 | base << 49 | first >> 4
        body.append(f"mov.u32 to, {variable}; shr.u32 to, to, 4; cvt.u64.u32 {descriptor}, to; "
                    f"add.u64 {descriptor}, {descriptor}, {bits:#x};")
    body += [f"mov.b32 {r}{i}, 0;" for r in "de" for i in range(4)]
    body += [f"mov.b32 a{i}, 0;" for i in range(4)]
    body += ["fence.proxy.async;", "bar.sync 0;", code,
             "ld.param.u64 at, [pd]; mul.wide.u32 x, t, 16; add.u64 at, at, x;",
             "st.global.v4.b32 [at], {d0, d1, d2, d3};"]
    shared = (f".shared .align 1024 .b8 tile_a[{IMAGE}];\n.shared .align 1024 .b8 tile_b[{IMAGE}];")
    text = entry({"pa": "u64", "pb": "u64", "pd": "u64"}, REGISTERS, "\n".join(body), shared=shared)
    d = np.zeros((block, 4), np.float32)
    images = [shifted(m, first, base) for m in (a, b)]
    report = sim.launch(text, "k", 1, block, [*images, d], seed=seed, policy=policy)
    rows = np.arange(128) // 32 * 16 + np.arange(128) % 32 // 4
    columns = np.arange(128) % 4 * 2
    product = a.astype(np.float32) @ b.T.astype(np.float32)
    right = np.stack([product[rows + 8 * (i // 2), columns + i % 2] for i in range(4)], 1)
    return report, d[:128], right


def shifted(matrix, first, base):
    """The image whose pattern begins at `base` rows of 128 bytes."""
    plain = image(matrix, "128B", False, 16, 1024)
    assert first % 1024 == base * 128
    return np.roll(plain, first)


def kinds(code, **options):
    return {f.kind for seed in range(3) for policy in (0, 1)
            for f in launch(code, seed=seed, policy=policy, **options)[0].findings}


def messages(code, **options):
    return " ".join(f.message for f in launch(code, **options)[0].findings)


def test_four_warps_with_one_product():
    report, d, right = launch(FENCE + wgmma() + COMMIT + WAIT)
    assert report.ok and (d == right).all(), str(report)


@pytest.mark.parametrize("before, said", [
    ("@p add.u64 db, db, 2;", "descriptor of B"),
    ("@p add.u64 da, da, 2;", "descriptor of A"),
    ("@p setp.ne.u32 q, 0, 0;", "scale-d"),
])
def test_warps_agree_in_their_operands(before, said):
    code = f"{WARP} setp.eq.u32 p, w, 2; {before}" + FENCE + wgmma() + COMMIT + WAIT
    assert "deadlock" in kinds(code) and said in messages(code)


def test_lanes_agree_in_their_descriptors():
    code = "setp.eq.u32 p, t, 7; @p add.u64 db, db, 2;" + FENCE + wgmma() + COMMIT + WAIT
    assert "deadlock" in kinds(code) and "lane 7" in messages(code)


def test_warps_execute_the_same_instruction():
    code = (f"{WARP} setp.eq.u32 p, w, 1; {FENCE} @p bra OTHER; {wgmma()} bra JOIN;"
            f"OTHER: {wgmma()} JOIN: {COMMIT + WAIT}")
    assert "deadlock" in kinds(code)
    skipped = f"{WARP} setp.eq.u32 p, w, 1; {FENCE} @p bra JOIN; {wgmma()} JOIN: {COMMIT + WAIT}"
    assert "deadlock" in kinds(skipped) and "found 3" in messages(skipped)


def test_a_warpgroup_has_four_warps():
    assert "four warps" in messages(FENCE + wgmma() + COMMIT + WAIT, block=160)


def test_more_wgmmas_than_are_kept():
    many = "mov.u32 v, 0; LOOP: " + FENCE + wgmma() + COMMIT + WAIT + """
        add.u32 v, v, 1; setp.lt.u32 p, v, 150; @p bra LOOP;"""
    report, d, right = launch(many)
    assert report.ok and (d == 150 * right).all(), str(report)


A = "{a0, a1, a2, a3}"


@pytest.mark.parametrize("touch, found", [
    ("mov.b32 a2, 5;", True),
    ("mov.b32 v, a2;", False),
    ("mov.b32 a2, 5;" + FENCE + wgmma(a=A) + COMMIT + WAIT, True),
    (wgmma(a=A) + COMMIT + WAIT, False),
    (WAIT + "mov.b32 a2, 5;", False),
])
def test_registers_of_a_in_flight(touch, found):
    code = FENCE + wgmma(a=A) + COMMIT + touch + WAIT
    assert ("race" in kinds(code)) == found


@pytest.mark.parametrize("second, found", [
    (wgmma(d="{e0, e1, e2, e3}"), False),
    (wgmma(), False),
    (wgmma(d="{d1, d0, d2, d3}"), True),
    # P of attention: an accumulator that the next product takes as A.
    (wgmma(d="{e0, e1, e2, e3}", a="{d0, d1, d2, d3}"), True),
    (COMMIT + WAIT + FENCE + wgmma(d="{e0, e1, e2, e3}", a="{d0, d1, d2, d3}"), False),
])
def test_wgmmas_that_follow_each_other(second, found):
    code = FENCE + wgmma() + second + COMMIT + WAIT
    assert ("race" in kinds(code)) == found


@pytest.mark.parametrize("first, base, right", [(0, 0, True), (1024, 0, True), (256, 2, True),
                                                (384, 3, True), (1024 + 896, 7, True)])
def test_base_offset(first, base, right):
    """A pattern that does not begin at a multiple of 1024 says how far behind one it begins."""
    report, d, expected = launch(FENCE + wgmma() + COMMIT + WAIT, first=first, base=base)
    assert report.ok and (d == expected).all() == right


def test_a_base_offset_that_is_not_given_reads_other_bytes():
    code = FENCE + f"add.u64 da, da, {(-2 << 49) % 2**64:#x};" + wgmma() + COMMIT + WAIT
    report, d, expected = launch(code, first=256, base=2)
    assert not (d == expected).all()
