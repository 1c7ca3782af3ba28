"""Warp collectives: shuffles, votes, matches, reductions, divergence."""

import numpy as np
import pytest
from ptxlib import entry, evaluate

from moe_mlir import sim

LANES = np.arange(32, dtype=np.uint32)
X = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)


def shuffled(mode, lane, b, c):
    """The PTX ISA's pseudo-code: (source lane, predicate)."""
    segment, clamp = c >> 8 & 31, c & 31
    high = (lane & segment) | (clamp & ~segment & 31)
    low = lane & segment
    b &= 31
    if mode == "up":
        j = lane - b
        return (j, True) if j >= high else (lane, False)
    if mode == "down":
        j = lane + b
    elif mode == "bfly":
        j = lane ^ b
    else:
        j = low | (b & ~segment & 31)
    return (j, True) if j <= high else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [2, 8, 16, 32])
def test_shuffle(mode, width):
    for b in (0, 1, 3, 7, 8, 15, 16, 31, 33):
        c = (32 - width) << 8 | (0 if mode == "up" else 31)
        got, moved = evaluate(
            f"shfl.sync.{mode}.b32 $0|p, $1, {b}, {c}, -1;"
            "selp.u32 $01, 1, 0, p;", (np.uint32, np.uint32), X)
        want = [shuffled(mode, lane, b, c) for lane in range(32)]
        assert np.array_equal(got, [X[j] for j, _ in want]), b
        assert np.array_equal(moved, [ok for _, ok in want]), b


def test_shuffle_clamps_inside_a_segment():
    c = 0b11000 << 8 | 0b00101  # segments of 8, the last source is 5
    for mode in ("down", "bfly", "idx"):
        got, moved = evaluate(
            f"shfl.sync.{mode}.b32 $0|p, $1, 3, {c}, -1;"
            "selp.u32 $01, 1, 0, p;", (np.uint32, np.uint32), X)
        want = [shuffled(mode, lane, 3, c) for lane in range(32)]
        assert np.array_equal(got, [X[j] for j, _ in want]), mode
        assert np.array_equal(moved, [ok for _, ok in want]), mode


def test_shuffle_by_registers():
    by = np.random.default_rng(1).integers(0, 32, 32).astype(np.uint32)
    got = evaluate("mov.u32 t0, 31; mov.u32 t1, -1;"
                   "shfl.sync.idx.b32 $0, $1, $2, t0, t1;", np.uint32, X, by)
    assert np.array_equal(got, X[by])


def test_shuffle_in_a_diverged_half():
    got = evaluate(
        "mov.u32 $0, 0; mov.u32 t0, %laneid; setp.lt.u32 p, t0, 16;"
        "@!p bra REST;"
        "shfl.sync.bfly.b32 $0, $1, 5, 31, 0x0000ffff;"
        "REST:", np.uint32, X, checked=True)
    want = np.where(LANES < 16, X[LANES ^ 5], 0)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("policy", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_lanes_of_a_full_mask_meet_wherever_they_wait(policy, seed):
    """Both sides of a branch run their own shuffle with their own mask, then
    all lanes meet at a full one: no schedule may deadlock or mix them up."""
    got = evaluate(
        "mov.u32 t0, %laneid; and.b32 t1, t0, 1; setp.eq.u32 p, t1, 0;"
        "@p bra EVEN;"
        "shfl.sync.bfly.b32 $0, $1, 2, 31, 0xaaaaaaaa; bra MEET;"
        "EVEN: shfl.sync.bfly.b32 $0, $1, 4, 31, 0x55555555;"
        "MEET: shfl.sync.bfly.b32 $0, $0, 1, 31, -1;", np.uint32, X,
        policy=policy, seed=seed)
    first = np.where(LANES % 2, X[LANES ^ 2], X[LANES ^ 4])
    assert np.array_equal(got, first[LANES ^ 1])


@pytest.mark.parametrize("pattern", [0, 0xFFFFFFFF, 1, 0x80000000, 0xF0F01234])
def test_votes(pattern):
    x = (np.uint32(pattern) >> LANES) & 1
    code = "setp.ne.u32 p, $1, 0; "
    flag = "selp.u32 $0, 1, 0, q;"
    got = evaluate(code + "vote.sync.ballot.b32 $0, p, -1;", np.uint32, x)
    assert (got == pattern).all()
    for mode, want in (("all", pattern == 0xFFFFFFFF), ("any", pattern != 0),
                       ("uni", pattern in (0, 0xFFFFFFFF))):
        got = evaluate(code + f"vote.sync.{mode}.pred q, p, -1;" + flag,
                       np.uint32, x)
        assert (got == want).all(), mode
    got = evaluate(code + "vote.sync.ballot.b32 $0, !p, -1;", np.uint32, x)
    assert (got == pattern ^ 0xFFFFFFFF).all()


def test_votes_count_only_their_mask():
    got = evaluate(
        "mov.u32 $0, 0; mov.u32 t0, %laneid; setp.lt.u32 p, t0, 7;"
        "@!p bra REST; setp.ne.u32 q, $1, 0;"
        "vote.sync.ballot.b32 $0, q, 0x7f;"
        "REST:", np.uint32, np.ones(32, np.uint32))
    assert np.array_equal(got, np.where(LANES < 7, 0x7F, 0))


def test_activemask_in_a_branch():
    got = evaluate(
        "mov.u32 $0, 0; mov.u32 t0, %laneid; setp.lt.u32 p, t0, 5;"
        "@!p bra REST; activemask.b32 $0;"
        "REST:", np.uint32, X)
    assert np.array_equal(got, np.where(LANES < 5, 0x1F, 0))


@pytest.mark.parametrize("width", [32, 64])
def test_match(width):
    x = np.random.default_rng(2).integers(0, 5, 32).astype(f"u{width // 8}")
    x *= x.dtype.type(2**(width - 3) + 1)
    got = evaluate(f"match.any.sync.b{width} $0, $1, -1;", np.uint32, x)
    want = [sum(1 << j for j in range(32) if x[j] == x[i]) for i in range(32)]
    assert np.array_equal(got, want)
    for values, equal in ((x, False), (np.full_like(x, 7), True)):
        got, flag = evaluate(
            f"match.all.sync.b{width} $0|p, $1, -1; selp.u32 $01, 1, 0, p;",
            (np.uint32, np.uint32), values)
        assert (got == (0xFFFFFFFF if equal else 0)).all()
        assert (flag == equal).all()


@pytest.mark.parametrize("op, kind, f", [
    ("add", "u32", lambda v: v.sum()), ("add", "s32", lambda v: v.sum()),
    ("min", "u32", np.min), ("max", "u32", np.max),
    ("min", "s32", np.min), ("max", "s32", np.max),
    ("and", "b32", np.bitwise_and.reduce), ("or", "b32", np.bitwise_or.reduce),
    ("xor", "b32", np.bitwise_xor.reduce)])
def test_redux(op, kind, f):
    got = evaluate(f"redux.sync.{op}.{kind} $0, $1, -1;", np.uint32, X)
    typed = X.view(np.int32) if kind == "s32" else X
    wide = typed.astype(np.int64) if op == "add" else typed
    assert (got == np.uint32(int(f(wide)) % 2**32)).all()
    # A subset of the lanes.
    got = evaluate(
        "mov.u32 $0, 0; mov.u32 t0, %laneid; setp.ge.u32 p, t0, 20;"
        f"@!p bra REST; redux.sync.{op}.{kind} $0, $1, 0xfff00000;"
        "REST:", np.uint32, X)
    want = np.uint32(int(f(wide[20:])) % 2**32)
    assert np.array_equal(got, np.where(LANES < 20, 0, want))


def test_elect_chooses_one_lane():
    leader, flag = evaluate("elect.sync $0|p, -1; selp.u32 $01, 1, 0, p;",
                            (np.uint32, np.uint32), X)
    assert len(set(leader.tolist())) == 1 and flag.sum() == 1
    assert flag[leader[0]] == 1


def test_lane_masks_and_ids():
    for name, want in (
            ("eq", 1 << LANES), ("lt", (1 << LANES) - 1),
            ("le", (2 << LANES.astype(np.uint64)) - 1),
            ("gt", 0xFFFFFFFF ^ ((2 << LANES.astype(np.uint64)) - 1)),
            ("ge", 0xFFFFFFFF ^ ((1 << LANES) - 1))):
        got = evaluate(f"mov.u32 $0, %lanemask_{name};", np.uint32, X)
        assert np.array_equal(got, want.astype(np.uint32)), name
    got = evaluate("mov.u32 t0, %tid.x; mov.u32 t1, %ctaid.x;"
                   "mov.u32 t2, %nctaid.x; mov.u32 t3, %ntid.x;"
                   "mad.lo.u32 t0, t1, 1000, t0;"
                   "mad.lo.u32 t0, t2, 100000, t0;"
                   "mad.lo.u32 $0, t3, 10000000, t0;", np.uint32,
                   np.zeros(192, np.uint32), block=64)
    i = np.arange(192)
    want = i % 64 + i // 64 * 1000 + 3 * 100000 + 64 * 10000000
    assert np.array_equal(got, want)


def test_indirect_branches():
    x = np.arange(32, dtype=np.uint32) % 3
    got = evaluate(
        "ts: .branchtargets A, B, C; brx.idx $1, ts;"
        "A: mov.u32 $0, 10; bra DONE; B: mov.u32 $0, 20; bra DONE;"
        "C: mov.u32 $0, 30; DONE:", np.uint32, x)
    assert np.array_equal(got, (x + 1) * 10)


def test_early_exit_leaves_the_other_lanes():
    got = evaluate(
        "mov.u32 t0, %laneid; setp.lt.u32 p, t0, 4; @p exit;"
        "vote.sync.ballot.b32 $0, 1, 0xfffffff0;", np.uint32, X)
    assert np.array_equal(got, np.where(LANES < 4, 0, 0xFFFFFFF0))


# --- divergence ---------------------------------------------------------------

# The odd lanes skip a part of the body, and the latch stands above the body.
ROTATED = """
mov.u32 t, %tid.x; and.b32 t, t, 1; setp.ne.u32 odd, t, 0; mov.u32 i, 0;
mov.u32 sum, 0; bra BODY;
LATCH: add.u32 i, i, 1; setp.lt.u32 p, i, 8; @p bra BODY; bra.uni END;
BODY: mul.lo.u32 t, i, i; @odd bra LATCH; add.u32 sum, sum, t; bra.uni LATCH;
END:"""
# Each lane leaves the loop in a turn of its own, to a place above the loop.
EARLY_EXIT = """
mov.u32 t, %tid.x; mov.u32 i, 0; mov.u32 sum, 0; bra LOOP;
OUT: add.u32 sum, sum, 100; bra.uni END;
LOOP: mul.lo.u32 sum, i, i; setp.eq.u32 p, i, t; @p bra OUT;
add.u32 i, i, 1; bra.uni LOOP;
END:"""
# The inner loop's turns depend on the lane; the outer one goes on together.
NESTED = """
mov.u32 t, %tid.x; and.b32 t, t, 3; mov.u32 i, 0; mov.u32 sum, 0;
OUTER: mov.u32 j, 0;
INNER: add.u32 sum, sum, 1; setp.lt.u32 p, j, t; add.u32 j, j, 1;
@p bra INNER;
mul.lo.u32 v, i, i; add.u32 i, i, 1; setp.lt.u32 p, i, 5; @p bra OUTER;"""


@pytest.mark.parametrize("code, opcode, times, results", [
    (ROTATED, "mul.lo.u32", 8,
     lambda t: 0 if t % 2 else sum(i * i for i in range(8))),
    (EARLY_EXIT, "mul.lo.u32", 32, lambda t: t * t + 100),
    (NESTED, "mul.lo.u32", 5, lambda t: 5 * (t % 4 + 1)),
], ids=["rotated loop", "early exit", "nested loops"])
def test_lanes_meet_where_their_paths_do(code, opcode, times, results):
    registers = {"out": "b64", "far": "b64", "odd": "pred", "p": "pred"} | {
        name: "b32" for name in ("t", "i", "j", "v", "sum")}
    text = entry({"pout": "u64"}, registers, code + """
        mov.u32 t, %tid.x; mul.wide.u32 far, t, 4; ld.param.u64 out, [pout];
        add.u64 out, out, far; st.global.u32 [out], sum;""")
    for seed in range(4):
        out = np.zeros(32, np.uint32)
        report = sim.launch(text, "k", 1, 32, [out], seed=seed)
        assert report.ok, str(report)
        assert out.tolist() == [results(t) for t in range(32)]
        instructions = report.counters["instructions"]
        assert instructions[opcode] == times
        assert instructions["st.global.u32"] == 1
        # Late reconvergence takes the same values by another way.
        late = np.zeros(32, np.uint32)
        assert sim.launch(text, "k", 1, 32, [late], seed=seed, policy=1).ok
        assert np.array_equal(late, out)
