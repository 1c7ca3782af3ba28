"""The language around the instructions: scopes, spaces, variables, calls."""

import numpy as np
import pytest
from ptxlib import HEADER, entry, evaluate

from moe_mlir import sim

X = np.arange(32, dtype=np.uint32)


def run(text, *args, grid=1, block=32, **options):
    report = sim.launch(text, "k", grid, block, list(args), **options)
    assert report.ok, str(report)
    return report


def test_a_scope_shadows_registers_and_labels():
    got = evaluate(
        "mov.u32 t0, 5; { .reg .b32 t0; .reg .pred p; mov.u32 t0, 7;"
        "setp.eq.u32 p, t0, 7; @p bra OUT; mov.u32 t0, 9; OUT: { .reg .b32 t0;"
        "mov.u32 t0, 11; bra OUT; mov.u32 t0, 13; OUT: } add.u32 $0, t0, 0; }"
        "{ .reg .b32 u; mov.u32 u, 100; bra OUT; mov.u32 u, 0; OUT:"
        "add.u32 $0, $0, u; } add.u32 $0, $0, t0;", np.uint32, X)
    assert (got == 7 + 100 + 5).all()


def test_labels_of_inline_assembly_repeat():
    loop = ("{ .reg .pred p; .reg .b32 c; mov.u32 c, 0; WAIT: add.u32 c, c, 1;"
            "setp.lt.u32 p, c, 3; @p bra WAIT; add.u32 t0, t0, c; }")
    got = evaluate("mov.u32 t0, 0;" + loop * 3 + "mov.u32 $0, t0;", np.uint32,
                   X)
    assert (got == 9).all()


def test_register_ranges_and_special_names():
    got = evaluate("{ .reg .b32 %r<4>; .reg .b32 $x, _y, a$1; mov.u32 %r3, 1;"
                   "mov.u32 $x, 2; mov.u32 _y, 3; mov.u32 a$1, 4;"
                   "add.u32 %r0, %r3, $x; add.u32 %r1, _y, a$1;"
                   "mul.lo.u32 %r2, %r0, %r1; mov.u32 t0, %r2; } "
                   "mov.u32 $0, t0;", np.uint32, X)
    assert (got == 21).all()


@pytest.mark.parametrize("literal, value", [
    ("12", 12), ("-1", 2**32 - 1), ("0x1F", 31), ("0X1fU", 31), ("017", 15),
    ("0b101", 5), ("12U", 12), ("WARP_SZ", 32),
])
def test_integer_literals(literal, value):
    got = evaluate(f"mov.u32 $0, {literal};", np.uint32, X)
    assert (got == value).all()


@pytest.mark.parametrize("kind, literal, value", [
    ("f32", "0f3F800000", 1.0), ("f32", "0f7F800000", np.inf),
    ("f32", "1.5", 1.5), ("f32", "-2.5e3", -2500.0),
    ("f64", "0d3FF8000000000000", 1.5), ("f64", "0.1", 0.1),
])
def test_float_literals(kind, literal, value):
    dtype = np.float32 if kind == "f32" else np.float64
    got = evaluate(f"mov.{kind} $0, {literal};", dtype, X)
    assert (got == value).all()


def module(globals_, body, functions=""):
    """One kernel: i is the thread, out its word of the result."""
    return f"""{HEADER}
{globals_}
{functions}
.visible .entry k(.param .u64 po)
{{
.reg .b32 i, v, w, t;
.reg .b64 out, far, at, at2;
.reg .pred p;
mov.u32 i, %tid.x;
ld.param.u64 out, [po];
mul.wide.u32 far, i, 4;
add.u64 out, out, far;
{body}
st.global.u32 [out], v;
ret;
}}
"""


def words(text, n=32, **options):
    out = np.zeros(n, np.uint32)
    run(text, out, block=n, **options)
    return out


def test_module_variables_and_initialisers():
    text = module(
        ".const .align 4 .u32 table[4] = {10, 20, 0x1E, 40};\n"
        ".global .align 4 .b8 bytes[8] = {1, 2, 3, 4, 0xFF};\n"
        ".global .align 4 .f32 pi = 0f40490FDB;\n"
        ".global .align 4 .u32 table2[3] = {7, 8, 9};\n"
        ".global .align 8 .u64 pointer = table2;\n"
        ".global .align 8 .u64 generic_pointer = generic(table2);",
        "ld.const.u32 v, [table+8]; ld.global.u32 w, [bytes];"
        "add.u32 v, v, w; ld.global.u8 w, [bytes+4]; add.u32 v, v, w;"
        "ld.global.u32 w, [pi]; add.u32 v, v, w; ld.global.u64 at, [pointer];"
        "ld.global.u32 w, [at+4]; add.u32 v, v, w;"
        "ld.global.u64 at, [generic_pointer]; ld.u32 w, [at+8];"
        "add.u32 v, v, w;")
    want = 30 + 0x04030201 + 0xFF + 0x40490FDB + 8 + 9
    assert (words(text) == want % 2**32).all()


def test_module_variables_live_as_long_as_the_module():
    text = module(".global .align 4 .u32 counter = 5;",
                  "atom.global.add.u32 v, [counter], 1;")
    loaded = sim.Module(text)
    for first in (5, 37):
        out = np.zeros(32, np.uint32)
        assert loaded.launch("k", 1, 32, [out]).ok
        assert sorted(out) == list(range(first, first + 32))


def test_bounds_of_module_variables():
    text = module(".global .align 4 .u32 few[3] = {1, 2, 3};",
                  "ld.global.u32 v, [few+12];")
    report = sim.launch(text, "k", 1, 32, [np.zeros(32, np.uint32)])
    assert [f.kind for f in report.findings] == ["bounds"]
    assert "few" in report.findings[0].message


def test_local_memory_is_of_the_thread():
    text = module("", """
    .local .align 4 .b8 stack[16];
    .reg .b64 sp;
    mov.u64 sp, stack;
    st.local.u32 [sp+4], i;
    cvta.local.u64 at, sp;
    mul.lo.u32 t, i, 3;
    st.u32 [at+8], t;
    bar.sync 0;
    ld.local.u32 v, [stack+8];
    ld.u32 w, [at+4];
    add.u32 v, v, w;""")
    assert np.array_equal(words(text), np.arange(32) * 4)


def test_local_memory_has_bounds():
    text = module("", ".local .align 4 .b8 stack[16];\n"
                  "st.local.u32 [stack+16], i; mov.u32 v, 0;")
    report = sim.launch(text, "k", 1, 32, [np.zeros(32, np.uint32)])
    assert {f.kind for f in report.findings} == {"bounds"}, str(report)


def test_generic_addresses_reach_every_space():
    text = module(".const .align 4 .u32 constant = 1000;", """
    .shared .align 4 .b8 box[128];
    mov.u64 at, box;
    cvta.shared.u64 at, at;
    add.u64 at, at, far;
    st.u32 [at], i;
    isspacep.shared p, at;
    selp.u32 w, 100, 0, p;
    ld.u32 v, [at];
    add.u32 v, v, w;
    mov.u64 at2, constant;
    cvta.const.u64 at2, at2;
    ld.u32 w, [at2];
    add.u32 v, v, w;
    cvta.to.shared.u64 at, at;
    isspacep.global p, out;
    @!p mov.u32 v, 0;""")
    assert np.array_equal(words(text), np.arange(32) + 1100)


def test_dynamic_shared_memory_follows_the_static():
    text = module(".extern .shared .align 16 .b8 dynamic[];", """
    .shared .align 4 .b8 fixed[128];
    mov.u32 t, dynamic;
    shl.b32 w, i, 2;
    add.u32 t, t, w;
    st.shared.u32 [t], i;
    setp.eq.u32 p, i, 0;
    @p st.shared.u32 [fixed], i;
    ld.shared.u32 v, [t];
    mov.u32 w, %dynamic_smem_size;
    add.u32 v, v, w;""")
    assert np.array_equal(words(text, dynamic_smem=128), np.arange(32) + 128)
    report = sim.launch(text, "k", 1, 32, [np.zeros(32, np.uint32)],
                        dynamic_smem=124)
    assert "bounds" in {f.kind for f in report.findings}


def test_vectors():
    x = np.arange(128, dtype=np.uint32)
    out = np.zeros(64, np.uint32)
    text = entry(
        {"pin": "u64", "po": "u64"},
        {"i": "b32", "far": "b64", "at": "b64", "a": "b32", "b": "b32",
         "c": "b32", "d": "b32", "h": "b16"},
        "mov.u32 i, %tid.x; mul.wide.u32 far, i, 16; ld.param.u64 at, [pin];"
        "add.u64 at, at, far; ld.global.nc.v4.u32 {a, b, c, d}, [at];"
        "add.u32 a, a, c; add.u32 b, b, d; shr.u64 far, far, 1;"
        "ld.param.u64 at, [po]; add.u64 at, at, far;"
        "st.global.v2.b32 [at], {b, a};")
    run(text, x, out)
    four = x.reshape(32, 4)
    assert np.array_equal(out.reshape(32, 2)[:, 1], four[:, 0] + four[:, 2])
    assert np.array_equal(out.reshape(32, 2)[:, 0], four[:, 1] + four[:, 3])
    report = sim.launch(text.replace("[po];", "[po]; add.u64 at, at, 4;"), "k",
                        1, 32, [x, np.zeros(66, np.uint32)])
    assert {f.kind for f in report.findings} == {"align"}


def test_narrow_loads_extend():
    x = np.array([0x80FF7F01] * 32, np.uint32)
    for kind, byte in (("s8", 3), ("u8", 3), ("s16", 2), ("u16", 2)):
        out = np.zeros(32, np.uint32)
        text = entry({"pin": "u64", "po": "u64"},
                     {"i": "b32", "far": "b64", "at": "b64", "v": "b32"},
                     "mov.u32 i, %tid.x; mul.wide.u32 far, i, 4;"
                     "ld.param.u64 at, [pin]; add.u64 at, at, far;"
                     f"ld.global.{kind} v, [at+{byte}]; ld.param.u64 at, [po];"
                     "add.u64 at, at, far; st.global.u32 [at], v;")
        run(text, x, out)
        value = 0x80 if kind[1:] == "8" else 0x80FF
        if kind[0] == "s":
            value |= 2**32 - (1 << int(kind[1:]))
        assert (out == value).all(), kind


FUNCTIONS = """
.func (.reg .b32 result) twice(.reg .b32 a)
{
    add.u32 result, a, a;
    ret;
}
.func (.param .b32 result) triangle(.param .b32 a)
{
    .reg .b32 n, r;
    .reg .pred p;
    ld.param.u32 n, [a];
    mov.u32 r, 0;
LOOP:
    setp.eq.u32 p, n, 0;
    @p bra DONE;
    add.u32 r, r, n;
    sub.u32 n, n, 1;
    bra LOOP;
DONE:
    st.param.u32 [result], r;
    ret;
}
.func (.param .b32 result) tetrahedron(.param .b32 a)
{
    .reg .b32 n, r, part;
    .reg .pred p;
    ld.param.u32 n, [a];
    mov.u32 r, 0;
LOOP:
    setp.eq.u32 p, n, 0;
    @p bra DONE;
    {
    .param .b32 down; .param .b32 up;
    st.param.b32 [down], n;
    call.uni (up), triangle, (down);
    ld.param.b32 part, [up];
    }
    add.u32 r, r, part;
    sub.u32 n, n, 1;
    bra LOOP;
DONE:
    st.param.u32 [result], r;
    ret;
}
"""
CALL = """{{ .param .b32 a; .param .b32 r; st.param.b32 [a], {1};
call (r), {0}, (a); ld.param.b32 v, [r]; }}"""


@pytest.mark.parametrize("policy", [0, 1])
def test_calls(policy):
    text = module("", CALL.format("triangle", "i"), FUNCTIONS)
    i = np.arange(32)
    assert np.array_equal(words(text, policy=policy), i * (i + 1) // 2)
    text = module("", "call (v), twice, (i);", FUNCTIONS)
    assert np.array_equal(words(text, policy=policy), 2 * i)


@pytest.mark.parametrize("policy", [0, 1])
def test_nested_calls_by_some_lanes(policy):
    body = ("and.b32 t, i, 7; mov.u32 v, 0; setp.lt.u32 p, i, 24;"
            "@!p bra REST;" + CALL.format("tetrahedron", "t") + "REST:")
    got = words(module("", body, FUNCTIONS), policy=policy)
    i = np.arange(32)
    n = i % 8
    assert np.array_equal(got, np.where(i < 24, n * (n + 1) * (n + 2) // 6, 0))


def test_recursion_is_refused_with_its_name():
    recursive = """
.func forever()
{
    call forever, ();
    ret;
}
"""
    with pytest.raises(sim.PtxError, match="recurs.*forever"):
        sim.Module(module("", "mov.u32 v, 0; call forever, ();", recursive))


def test_struct_parameters():
    text = f"""{HEADER}
.visible .entry k(.param .align 8 .b8 s[16], .param .u64 po)
{{
.reg .b32 v, w; .reg .b64 out, n; .reg .pred p;
mov.u32 v, %tid.x; setp.ne.u32 p, v, 0; @p ret;
ld.param.u64 out, [po]; ld.param.u64 n, [s]; ld.param.u32 v, [s+8];
ld.param.u16 w, [s+12]; add.u32 v, v, w; cvt.u32.u64 w, n; add.u32 v, v, w;
st.global.u32 [out], v;
ret;
}}
"""
    data = np.array((1000, 20, 3, 0), "u8, u4, u2, u2").tobytes()
    out = np.zeros(1, np.uint32)
    run(text, data, out)
    assert out[0] == 1023


def test_scalar_parameters_take_the_declared_type():
    text = f"""{HEADER}
.visible .entry k(.param .u64 po, .param .f32 f, .param .s16 s, .param .u8 b,
                  .param .f64 d, .param .u64 n)
{{
.reg .b32 a, c; .reg .b64 out, e, n64; .reg .b16 h, o; .reg .pred p;
mov.u32 a, %tid.x; setp.ne.u32 p, a, 0; @p ret;
ld.param.u64 out, [po]; ld.param.f32 a, [f]; ld.param.s16 h, [s];
ld.param.u8 o, [b]; ld.param.f64 e, [d]; ld.param.u64 n64, [n];
cvt.rzi.s32.f32 a, a; cvt.s32.s16 c, h; add.s32 a, a, c;
cvt.u32.u16 c, o; add.s32 a, a, c; cvt.rzi.s32.f64 c, e; add.s32 a, a, c;
cvt.u32.u64 c, n64; add.s32 a, a, c; st.global.u32 [out], a;
ret;
}}
"""
    out = np.zeros(1, np.uint32)
    run(text, out, 100.0, -3, 200, 7000.5, 10000)
    assert out[0] == 100 - 3 + 200 + 7000 + 10000
    run(text, out, np.float32(1), np.int16(2), np.uint8(3), np.float64(4),
        np.uint64(5))
    assert out[0] == 15


def test_directives_and_comments_that_mean_nothing_here():
    text = f"""//
{HEADER}
/* a comment
   over lines */
.file 1 "kernel.cu"
.visible .entry k(.param .u64 .ptr .global .align 16 po)
.maxntid 32, 1, 1
.minnctapersm 1
{{
.pragma "nounroll";
.reg .b64 out; .reg .b32 v; .reg .pred p;
.loc 1 2 3
.loc 1 3 5, function_name info, inlined_at 1 2 3
mov.u32 v, %tid.x; // trailing
setp.ne.u32 p, v, 0;
@p bra $L__END;
ld.param.u64 out, [po];
prefetch.global.L2 [out];
st.global.wb.u32 [out], 7;
$L__END:
ret;
}}
.section .debug_str
{{
info:
.b8 107, 0
}}
"""
    out = np.zeros(1, np.uint32)
    run(text, out)
    assert out[0] == 7


def test_wide_blocks_and_grids():
    out = np.zeros(2 * 3 * 2 * 4 * 4 * 2, np.uint32)
    text = entry(
        {"po": "u64"},
        {"x": "b32", "n": "b32", "i": "b32", "at": "b64", "far": "b64",
         "y": "b32"},
        "mov.u32 i, %ctaid.z;" + "".join(
            f"mov.u32 n, %{size}; mov.u32 x, %{index}; mad.lo.u32 i, i, n, x;"
            for size, index in (
                ("nctaid.y", "ctaid.y"), ("nctaid.x", "ctaid.x"),
                ("ntid.z", "tid.z"), ("ntid.y", "tid.y"),
                ("ntid.x", "tid.x")))
        + "ld.param.u64 at, [po]; mul.wide.u32 far, i, 4; add.u64 at, at, far;"
        "add.u32 i, i, 1; st.global.u32 [at], i;")
    report = sim.launch(text, "k", (2, 3, 2), (4, 4, 2), [out])
    assert report.ok, str(report)
    assert np.array_equal(out, np.arange(1, len(out) + 1))


@pytest.mark.parametrize("broken, complaint", [
    ("add.u32 v, v, nowhere;", "nowhere"),
    ("bra NOWHERE;", "NOWHERE"),
    ("add.u32 v, v;", "add.u32"),
    ("ld.global.u32 v, [out;", r"\]|expected"),
    ("st.global.u32 [out], v", ";|expected"),
])
def test_broken_text_names_the_line(broken, complaint):
    text = module("", "mov.u32 v, 1;\n" + broken + "\nmov.u32 v, 2;")
    with pytest.raises(sim.PtxError, match=complaint) as caught:
        sim.Module(text)
    line = text[: text.index(broken)].count("\n") + 1
    assert any(str(n) in str(caught.value) for n in (line, line + 1))
