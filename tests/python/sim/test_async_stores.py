"""Asynchronous stores and reductions into a cluster, and through tensor maps."""

import numpy as np
import pytest
from ptxlib import entry

from moe_mlir import sim

SEEDS = 6
THREADS = 64

REGISTERS = {
    "in": "b64", "out": "b64", "at": "b64", "i": "b32", "x": "b32",
    "rank": "b32", "to": "b32", "b": "b32", "far": "b32", "farbar": "b32",
    "t": "b32", "p": "pred", "q": "pred", "r": "pred",
    **{f"v{i}": "b32" for i in range(4)}, **{f"w{i}": "b64" for i in range(2)},
}
SHARED = (".shared .align 16 .b8 tile[1024]; .shared .align 16 .b8 src[256]; "
          ".shared .align 8 .b8 bar[8];")
# Each block expects `bytes` from its peer on its own barrier; `i` numbers the
# threads of both blocks, `far` and `farbar` lie in the peer.
BEGIN = """
ld.param.u64 in, [pin]; ld.param.u64 out, [pout];
mov.u32 x, %tid.x; mov.u32 rank, %cluster_ctarank;
mad.lo.u32 i, rank, 64, x; mov.u32 to, tile; mov.u32 b, bar;
setp.eq.u32 q, x, 0;
@q mbarrier.init.shared.b64 [b], 1;
@q fence.mbarrier_init.release.cluster;
@q mbarrier.arrive.expect_tx.shared.b64 _, [b], {bytes};
{before}
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
xor.b32 t, rank, 1;
mapa.shared::cluster.u32 far, to, t; mapa.shared::cluster.u32 farbar, b, t;
"""
WAIT = """
SPIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 r, [b], 0;
@!r bra SPIN;
"""


def exchange(code, data, out, *, bytes, before="", wait=WAIT, **options):
    """Runs two blocks that send each other `bytes` bytes."""
    text = entry({"pin": "u64", "pout": "u64"}, REGISTERS,
                 BEGIN.format(bytes=bytes, before=before)
                 + code.replace("WAIT;", wait), shared=SHARED)
    return sim.launch(text, "k", 2, THREADS, [data, out], cluster=2, **options)


def element(size):
    """`at` and `t` become the thread's element in memory and in the tile."""
    return (f"mul.wide.u32 at, i, {size}; add.u64 at, at, in; "
            f"mul.lo.u32 t, x, {size}; ")


STORES = {
    "u32": ("v0", 4), "f32": ("v0", 4), "b64": ("w0", 8),
    "v2.u32": ("{v0, v1}", 8), "v4.f32": ("{v0, v1, v2, v3}", 16),
    "v2.b64": ("{w0, w1}", 16),
}


def store(suffix, wait=WAIT):
    values, size = STORES[suffix]
    memory = suffix.replace("f32", "b32").replace("u32", "b32")
    code = element(size) + f"""
    ld.global.{memory} {values}, [at]; add.u32 far, far, t;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.{suffix}
        [far], {values}, [farbar];
    WAIT;
    add.u32 t, t, to; ld.shared.{memory} {values}, [t];
    sub.u64 at, at, in; add.u64 at, at, out;
    st.global.{memory} [at], {values};
    """
    data = np.random.default_rng(1).integers(
        0, 2**32, (2, THREADS, size // 4), dtype=np.uint32)
    out = np.zeros_like(data)
    return code, data, out, size * THREADS


@pytest.mark.parametrize("suffix", STORES)
def test_store_reaches_the_peer(suffix):
    code, data, out, bytes = store(suffix)
    for seed in range(SEEDS):
        for policy in (0, 1):
            out[:] = 0
            report = exchange(code, data, out, bytes=bytes, seed=seed,
                              policy=policy)
            assert report.ok, str(report)
            assert np.array_equal(out, data[::-1])


def test_reading_before_the_wait_is_a_race():
    code, data, out, bytes = store("u32")
    kinds = set()
    for seed in range(SEEDS):
        report = exchange(code, data, out, bytes=bytes, seed=seed, wait="")
        kinds |= {f.kind for f in report.findings}
    assert "race" in kinds or "uninit" in kinds


def test_bytes_that_never_come_are_a_deadlock():
    code, data, out, bytes = store("u32")
    report = exchange(code, data, out, bytes=bytes + 4)
    assert {f.kind for f in report.findings} == {"deadlock"}


def test_mbarrier_must_be_where_the_bytes_go():
    code, data, out, bytes = store("u32")
    report = exchange(code.replace("[farbar]", "[b]"), data, out, bytes=bytes)
    assert any("another block of the cluster" in f.message
               for f in report.findings)


REDUCTIONS = {
    "add.u32": lambda old, v: np.uint32((int(old) + int(v)) % 2**32),
    "min.s32": lambda old, v: min(old.view(np.int32), v.view(np.int32)),
    "max.u32": max,
    "and.b32": lambda old, v: old & v,
    "or.b32": lambda old, v: old | v,
    "xor.b32": lambda old, v: old ^ v,
    "inc.u32": lambda old, v: np.uint32(0 if old >= v else old + 1),
    "dec.u32": lambda old, v: v if old == 0 or old > v else old - 1,
}
# Threads 0 ... 3 set the four words that all threads of the peer reduce into.
SET = """setp.lt.u32 p, x, 4; shl.b32 t, x, 2; add.u32 t, t, to;
mov.u32 v0, 5; @p st.shared.u32 [t], v0; """


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_reductions_of_all_threads(operation):
    rng = np.random.default_rng(2)
    data = rng.integers(0, 2**32, (2, THREADS), dtype=np.uint32)
    if operation[:3] in ("inc", "dec"):
        data[:] = 7  # one limit: the result does not depend on the order
    code = element(4) + f"""
    ld.global.u32 v0, [at]; and.b32 t, t, 15; add.u32 far, far, t;
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}
        [far], v0, [farbar];
    WAIT;
    add.u32 t, t, to; ld.shared.u32 v0, [t];
    sub.u64 at, at, in; add.u64 at, at, out; st.global.u32 [at], v0;
    """
    expected = np.full((2, 4), 5, np.uint32)
    for block in range(2):
        for thread in range(THREADS):
            old = expected[1 - block, thread % 4]
            new = REDUCTIONS[operation](old, data[block, thread])
            expected[1 - block, thread % 4] = np.asarray(new).astype(np.uint32)
    for seed in range(SEEDS):
        out = np.zeros_like(data)
        report = exchange(code, data, out, bytes=4 * THREADS, before=SET,
                          seed=seed, policy=seed % 2)
        assert report.ok, str(report)
        assert np.array_equal(out, np.tile(expected, THREADS // 4))


def test_64_bit_reduction():
    data = np.random.default_rng(3).integers(0, 2**62, (2, THREADS),
                                             dtype=np.uint64)
    out = np.zeros_like(data)
    code = element(8) + """
    ld.global.u64 w0, [at];
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64
        [far], w0, [farbar];
    WAIT;
    ld.shared.u64 w0, [to]; sub.u64 at, at, in; add.u64 at, at, out;
    st.global.u64 [at], w0;
    """
    report = exchange(code, data, out, bytes=8 * THREADS,
                      before="mov.u64 w0, 0; @q st.shared.u64 [to], w0;")
    assert report.ok, str(report)
    sums = [sum(int(v) for v in row) % 2**64 for row in data]
    assert (out[0] == sums[1]).all() and (out[1] == sums[0]).all()


def test_an_unordered_plain_store_races_with_a_reduction():
    data = np.ones((2, THREADS), np.uint32)
    code = """
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32
        [far], x, [farbar];
    mov.u32 v0, 1; @q st.shared.u32 [to], v0;
    WAIT;
    """
    found = set()
    for seed in range(SEEDS):
        report = exchange(code, data, data.copy(), bytes=4 * THREADS,
                          before=SET, seed=seed)
        found |= {f.kind for f in report.findings}
    assert found == {"race"}


def test_bulk_reduction_into_the_peer():
    data = np.random.default_rng(4).integers(-9, 9, (2, THREADS)).astype(
        np.int32)
    # The tile starts as the thread's index, the source is the input.
    fill = element(4) + """
    ld.global.u32 v0, [at]; mov.u32 v1, src; add.u32 v1, v1, t;
    st.shared.u32 [v1], v0; add.u32 v1, t, to; st.shared.u32 [v1], x;
    fence.proxy.async; bar.sync 0;
    """
    code = element(4) + """
    mov.u32 v1, src;
    @q cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.s32
        [far], [v1], 256, [farbar];
    WAIT;
    add.u32 t, t, to; ld.shared.u32 v0, [t];
    sub.u64 at, at, in; add.u64 at, at, out; st.global.u32 [at], v0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    for seed in range(SEEDS):
        out = np.zeros_like(data)
        report = exchange(code, data, out, bytes=256, before=fill, seed=seed)
        assert report.ok, str(report)
        assert np.array_equal(out, data[::-1] + np.arange(THREADS))


# --- through a tensor map -----------------------------------------------------

TENSOR = """
{{ .reg .b64 m; mov.b64 m, map; cvta.param.u64 m, m;
ld.param.u64 in, [pin]; mov.u32 x, %tid.x; mov.u32 to, tile;
setp.eq.u32 q, x, 0; shl.b32 t, x, 2;
cvt.u64.u32 at, t; add.u64 at, at, in; ld.global.u32 v0, [at];
add.u32 t, t, to; st.shared.u32 [t], v0;
fence.proxy.async; bar.sync 0;
mov.u32 v0, 8; mov.u32 v1, 1;
@q cp.reduce.async.bulk.tensor.2d.global.shared::cta.{}.tile.bulk_group
    [m, {{v0, v1}}], [to];
@q cp.async.bulk.commit_group; @q cp.async.bulk.wait_group 0; }}
"""


def to_bf16(x):
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("operation, dtype, combine", [
    ("add", "int32", np.add), ("min", "int32", np.minimum),
    ("max", "uint32", np.maximum), ("xor", "uint32", np.bitwise_xor),
    ("add", "float32", np.add), ("min", "float16", np.minimum),
    ("add", "float16", np.add), ("add", "bfloat16", np.add),
])
def test_tensor_reduction(operation, dtype, combine):
    rng = np.random.default_rng(5)
    wide = np.float32 if dtype == "bfloat16" else np.dtype(dtype)
    encode = to_bf16 if dtype == "bfloat16" else lambda x: x
    low = 0 if dtype.startswith("u") else -8
    item = 2 if "16" in dtype else 4
    columns = 64 // item  # 64 bytes a row, four rows
    tile = rng.integers(low, 9, (4, columns)).astype(wide)
    # The tile starts at column 8, row 1; its last row lies outside.
    tensor = rng.integers(low, 9, (4, columns + 8)).astype(wide)
    expected = tensor.copy()
    expected[1:, 8:] = combine(tensor[1:, 8:], tile[:3])
    text = entry({"map[128]": "align 64 .b8", "pin": "u64"}, REGISTERS,
                 TENSOR.format(operation), shared=SHARED.replace(
                     ".align 16 .b8 tile", ".align 128 .b8 tile"))
    memory = encode(tensor)
    report = sim.launch(text, "k", 1, THREADS, [
        sim.TensorMap(memory, (columns, 4), dtype=dtype), encode(tile)])
    assert report.ok, str(report)
    assert np.array_equal(memory, encode(expected))
