"""Registers that nothing has written: bit by bit, as compilers pack an unwritten half with one that
counts and mask it away later."""

import numpy as np
import pytest
from ptxlib import entry

from moe_mlir import sim

# Nothing writes u, h and none; x is 0x1234, c is 3, and one holds in every lane.
REGISTERS = {"r": "b32", "t": "b32", "x": "b32", "u": "b32", "c": "b32", "out": "b64", "at": "b64",
             "wide": "b64", "h": "b16", "k": "b16", "j": "b16", "p": "pred", "q": "pred",
             "one": "pred", "none": "pred", **{f"f{i}": "f32" for i in range(3)}}
BEGIN = """ld.param.u64 out, [pout]; mov.u32 t, %tid.x; mul.wide.u32 at, t, 4; add.u64 at, at, out;
mov.u32 x, 0x1234; mov.u32 c, 3; mov.b16 k, 0x1234; setp.ne.u32 one, x, 0;"""
STORE = "st.global.b32 [at], r;"
HALF = "mov.b32 r, {k, h};"


def findings(code, seed=0, **options):
    text = entry({"pout": "u64"}, REGISTERS, BEGIN + code)
    out = np.zeros(32, np.uint32)
    report = sim.launch(text, "k", 1, 32, [out], seed=seed, **options)
    return [f.kind for f in report.findings], out


@pytest.mark.parametrize("code, value", [
    (HALF + "and.b32 r, r, 0xffff;", 0x1234),
    (HALF + "and.b32 r, r, 0xff;", 0x34),
    (HALF + "shl.b32 r, r, 16;", 0x12340000),
    (HALF + "prmt.b32 r, r, x, 0x5410;", 0x12341234),
    (HALF + "prmt.b32 r, r, r, 0x1010;", 0x12341234),
    (HALF + "mov.b32 {j, _}, r; cvt.u32.u16 r, j;", 0x1234),
    (HALF + "cvt.u16.u32 j, r; cvt.u32.u16 r, j;", 0x1234),
    (HALF + "cvt.s32.s16 r, r;", 0x1234),
    (HALF + "bfe.u32 r, r, 4, 8;", 0x23),
    (HALF + "bfi.b32 r, r, c, 8, 16;", 0x123403),
    (HALF + "shf.l.wrap.b32 r, x, r, 16; and.b32 r, r, 0xffff;", 0),
    (HALF + "or.b32 r, r, 0xffff0000;", 0xffff1234),
    (HALF + "lop3.b32 r, r, 0xffff, 0, 0xc0;", 0x1234),
    (HALF + "add.u32 r, r, x; and.b32 r, r, 0xffff;", 0x2468),
    (HALF + "shl.b32 r, r, 16; shr.u32 r, r, 16;", 0x1234),
    (HALF + "add.u16x2 r, r, x; and.b32 r, r, 0xffff;", 0x2468),
    (HALF + "shfl.sync.idx.b32 r, r, 0, 31, -1; and.b32 r, r, 0xffff;", 0x1234),
    (HALF + "xor.b32 r, r, -1; and.b32 r, r, 0xffff;", 0xedcb),
    ("selp.b32 r, x, u, one;", 0x1234),
    ("mov.b64 wide, {x, u}; cvt.u32.u64 r, wide;", 0x1234),
    ("mov.b64 wide, {u, x}; shr.u64 wide, wide, 32; cvt.u32.u64 r, wide;", 0x1234),
    ("or.pred p, one, none; selp.u32 r, x, c, p;", 0x1234),
    (HALF + "set.nan.f16x2.f16x2 r, r, r; and.b32 r, r, 0xffff;", 0),
    ("mov.b32 f1, 0f3f800000; cvt.rn.satfinite.e5m2x2.f32 j, f2, f1; cvt.rn.f16x2.e5m2x2 r, j;"
     "and.b32 r, r, 0xffff;", 0x3c00),
    ("mov.b32 f1, 0f3f800000; cvt.rn.satfinite.e4m3x2.f32 j, f1, f2; cvt.u32.u16 r, j;"
     "shr.u32 r, r, 8;", 0x38),
])
def test_unwritten_bits_that_are_discarded(code, value):
    for seed in (0, 1):
        kinds, out = findings(code + STORE, seed)
        assert kinds == [] and (out == value).all(), hex(out[0])


@pytest.mark.parametrize("code", [
    "mov.b32 r, u;",
    HALF + "shr.u32 r, r, 16;",
    HALF + "prmt.b32 r, r, x, 0x3232;",
    HALF + "mov.b32 {_, j}, r; cvt.u32.u16 r, j;",
    HALF + "bfe.u32 r, r, 16, 8; shl.b32 r, r, 24; shr.s32 r, r, 31;",
    "selp.b32 r, u, x, one;",
    "add.u32 r, u, x;",
    "shfl.sync.idx.b32 r, u, 0, 31, -1;",
    "mov.b64 wide, {u, x}; cvt.u32.u64 r, wide; shr.s32 r, r, 8; shl.b32 r, r, 31; shr.u32 r, r, 31;"
    "setp.ne.u32 p, r, 0; selp.u32 r, 1, 2, p;",
])
def test_a_value_of_unwritten_bits_is_found(code):
    # What a store makes of bits that are undefined in part is another question: ask a branch too.
    assert "uninit" in findings(code + "setp.eq.u32 q, r, 5; @q bra END; END:" + STORE)[0]


@pytest.mark.parametrize("code", [
    "and.b32 r, u, 1; setp.eq.u32 p, r, 1; @p bra END; END:",
    HALF + "setp.eq.u32 p, r, 0x1234; @p bra END; END:",
    "and.pred p, one, none; @p bra END; END:",
    "selp.b32 r, x, c, none; setp.eq.u32 p, r, 1; @p bra END; END:",
    HALF + "shl.b32 c, c, r; setp.eq.u32 p, c, 1; @p bra END; END:",
    HALF + "cvt.u64.u32 wide, r; add.u64 at, at, wide; ld.global.u32 r, [at];",
])
def test_what_depends_on_unwritten_bits_is_found(code):
    assert "uninit" in findings(code, checks=("uninit",))[0]


def test_a_loop_that_fills_the_other_half_later():
    """Defined where it is used, in every lane that gets there."""
    code = f"""mov.u32 c, 0;
    LOOP: {HALF} setp.eq.u32 p, c, 0; @p bra NEXT; setp.eq.u32 q, r, 0x56781234; @!q trap;
    NEXT: mov.b16 h, 0x5678; add.u32 c, c, 1; setp.lt.u32 p, c, 3; @p bra LOOP;
    {STORE}"""
    kinds, out = findings(code)
    assert kinds == [] and (out == 0x56781234).all()
