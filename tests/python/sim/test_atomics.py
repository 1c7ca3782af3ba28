"""Atomic operations on every type, in global and shared memory."""

import numpy as np
import pytest
from ptxlib import entry

from moe_mlir import sim

N = 64


def run(code, cell, values, result_type, *, space="global", blocks=2,
        vector=1):
    """Every thread runs `code` on one cell: [cell], v (its value), r."""
    cell, values = np.array(cell), np.array(values)
    width = 8 * values.itemsize
    out = np.zeros(len(values), result_type)
    registers = {"at": "b64", "i": "b32", "t": "b32", "far": "b64",
                 "v": f"b{max(16, width)}", "r": f"b{8 * out.itemsize}",
                 "cell": "b64" if space == "global" else "b32", "p": "pred",
                 "init": f"b{8 * cell.itemsize}"}
    size = cell.itemsize
    body = ["mov.u32 i, %ctaid.x;", "mov.u32 t, %ntid.x;",
            "mul.lo.u32 i, i, t;", "mov.u32 t, %tid.x;", "add.u32 i, i, t;"]
    if space == "global":
        body += ["ld.param.u64 cell, [pcell];"]
    else:
        body += ["mov.u32 cell, box;", "ld.param.u64 at, [pcell];",
                 "setp.ne.u32 p, t, 0;", "@p bra SET;",
                 f"ld.global.b{8 * size} init, [at];",
                 f"st.shared.b{8 * size} [cell], init;", "SET: bar.sync 0;"]
    body += ["ld.param.u64 at, [pv];",
             f"mul.wide.u32 far, i, {values.itemsize};", "add.u64 at, at, far;",
             f"ld.global.b{width} v, [at];", code.replace("SPACE", space)]
    if space == "shared":
        body += ["bar.sync 0;", "@p bra STORED;", "ld.param.u64 at, [pcell];",
                 f"ld.shared.b{8 * size} init, [cell];",
                 f"st.global.b{8 * size} [at], init;", "STORED:"]
    body += ["ld.param.u64 at, [pout];", f"mul.wide.u32 far, i, {out.itemsize};",
             "add.u64 at, at, far;", f"st.global.b{8 * out.itemsize} [at], r;"]
    text = entry({"pcell": "u64", "pv": "u64", "pout": "u64"}, registers,
                 "\n".join(body), shared=".shared .align 8 .b8 box[16];")
    if space == "shared":
        blocks = 1
    report = sim.launch(text, "k", blocks, len(values) // blocks,
                        [cell, values, out])
    assert report.ok, str(report)
    return cell, out


def integers(dtype):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    return rng.integers(info.min // 2, info.max // 2, N, dtype=dtype)


REDUCE = {"add": np.add, "min": np.minimum, "max": np.maximum,
          "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}

INTEGER = [(op, kind) for op in ("add", "min", "max")
           for kind in ("u32", "s32", "u64", "s64")
           if (op, kind) != ("add", "s64")] + [
    (op, kind) for op in ("and", "or", "xor") for kind in ("b32", "b64")]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("op, kind", INTEGER)
def test_integer_reductions(op, kind, space):
    dtype = np.dtype(kind.replace("s", "i").replace("b", "u").replace(
        "32", "4").replace("64", "8"))
    values = integers(dtype)
    want = REDUCE[op].reduce(values, dtype=dtype)
    start = values[:1] * 0 if op in ("add", "or", "xor") else values[:1].copy()
    cell, _ = run(f"red.SPACE.{op}.{kind} [cell], v; mov.b{dtype.itemsize * 8}"
                  " r, 0;", start, values, dtype, space=space)
    assert cell[0] == want
    cell, old = run(f"atom.SPACE.{op}.{kind} r, [cell], v;", start, values,
                    dtype, space=space)
    assert cell[0] == want
    if op == "add":  # some order explains what each thread saw
        modulus = 2 ** (8 * dtype.itemsize)
        seen = [int(o) % modulus for o in old]
        after = [(int(o) + int(v)) % modulus for o, v in zip(old, values)]
        assert sorted([*after, 0]) == sorted([*seen, int(want) % modulus])


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("width", [32, 64])
def test_exchange_passes_each_value_once(space, width):
    values = np.arange(1, N + 1).astype(f"u{width // 8}")
    cell, old = run(f"atom.SPACE.exch.b{width} r, [cell], v;",
                    values[:1] * 0, values, values.dtype, space=space)
    assert sorted([*old, cell[0]]) == list(range(N + 1))


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("width", [32, 64])
def test_one_compare_and_swap_wins(space, width):
    values = np.arange(1, N + 1).astype(f"u{width // 8}")
    cell, old = run(f"atom.SPACE.cas.b{width} r, [cell], 0, v;",
                    values[:1] * 0, values, values.dtype, space=space)
    assert (old == 0).sum() == 1
    assert cell[0] == values[old == 0][0]
    assert (old[old != 0] == cell[0]).all()


@pytest.mark.parametrize("space", ["global", "shared"])
def test_wrapping_counters(space):
    values = np.full(N, 9, np.uint32)
    cell, old = run("atom.SPACE.inc.u32 r, [cell], v;", np.zeros(1, np.uint32),
                    values, np.uint32, space=space)
    assert cell[0] == N % 10
    assert sorted(old) == sorted(i % 10 for i in range(N))
    cell, old = run("atom.SPACE.dec.u32 r, [cell], v;", np.zeros(1, np.uint32),
                    values, np.uint32, space=space)
    assert cell[0] == -N % 10
    assert sorted(old) == sorted(-i % 10 for i in range(N))


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_float_add(space, kind):
    dtype = np.dtype(kind.replace("32", "4").replace("64", "8"))
    values = np.random.default_rng(0).integers(-99, 99, N).astype(dtype)
    cell, old = run(f"atom.SPACE.add.{kind} r, [cell], v;", np.zeros(1, dtype),
                    values, dtype, space=space)
    assert cell[0] == values.sum()
    assert sorted([*(old + values), 0]) == sorted([*old, values.sum()])


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_half_add(kind):
    values = np.random.default_rng(0).integers(-3, 4, (N, 2))
    if kind == "f16x2":
        packed = values.astype(np.float16).view(np.uint32)[:, 0]
    else:
        halves = values.astype(np.float32).view(np.uint32) >> 16
        packed = halves.astype(np.uint16).view(np.uint32)[:, 0]
    cell, _ = run(f"atom.global.add.noftz.{kind} r, [cell], v;",
                  np.zeros(1, np.uint32), packed, np.uint32)
    if kind == "f16x2":
        got = cell.view(np.float16)
    else:
        got = (cell.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(got, values.sum(0))


def test_half_add():
    values = np.random.default_rng(0).integers(-3, 4, N).astype(np.float16)
    cell, _ = run("atom.global.add.noftz.f16 r, [cell], v;",
                  np.zeros(1, np.float16), values, np.uint16)
    assert cell[0] == values.astype(np.int64).sum()


@pytest.mark.parametrize("opcode", ["add.v{}.f32", "v{}.f32.add"])
@pytest.mark.parametrize("lanes", [2, 4])
def test_vector_add(lanes, opcode):
    cells = np.zeros(4, np.float32)
    values = np.arange(N).astype(np.float32)
    listed = ", ".join(["v"] * lanes)
    cell, _ = run(f"red.global.{opcode.format(lanes)} [cell], {{{listed}}};"
                  "mov.b32 r, 0;", cells, values, np.uint32)
    want = np.zeros(4)
    want[:lanes] = values.sum()
    assert np.array_equal(cell, want)


def test_order_of_lanes_depends_on_the_seed():
    """Float sums that depend on the order must be seen to do so."""
    values = np.array([1e8, 1.0, -1e8, 1.0] * 16, np.float32)
    sums = set()
    for seed in range(8):
        cell = np.zeros(1, np.float32)
        text = entry(
            {"pcell": "u64", "pv": "u64"},
            {"a": "b64", "b": "b64", "far": "b64", "i": "b32", "v": "b32"},
            "mov.u32 i, %tid.x; mul.wide.u32 far, i, 4;"
            "ld.param.u64 a, [pcell]; ld.param.u64 b, [pv];"
            "add.u64 b, b, far; ld.global.b32 v, [b];"
            "red.global.add.f32 [a], v;")
        report = sim.launch(text, "k", 1, N, [cell, values], seed=seed)
        assert report.ok, str(report)
        sums.add(float(cell[0]))
    assert len(sums) > 1
