"""Tensor maps that kernels build and change, their fences, and element strides."""

import numpy as np
import pytest
from ptxlib import entry

from moe_mlir import sim

REGISTERS = {"in": "b64", "out": "b64", "map": "b64", "at": "b64", "generic": "b64", "x": "b32",
             "t": "b32", "s": "b32", "m": "b32", "b": "b32", "v": "b32", "p": "pred", "q": "pred"}
SHARED = (".shared .align 128 .b8 tile[512]; .shared .align 128 .b8 staged[192];"
          ".shared .align 8 .b8 bar[8];")
ROWS, COLS, BOX = 8, 16, (4, 8)  # rows and columns of the box

BEGIN = """ld.param.u64 in, [pin]; ld.param.u64 out, [pout]; ld.param.u64 map, [pmap];
mov.u32 x, %tid.x; mov.u32 s, tile; mov.u32 m, staged; mov.u32 b, bar; setp.ne.u32 q, x, 0;
shl.b32 t, x, 2; add.u32 t, t, m; setp.gt.u32 p, x, 31;
"""
ZERO = "mov.u32 v, 0; @!p st.shared.b32 [t], v; bar.warp.sync -1;"
FIELDS = {
    "global_address": "b64 [{m}], in",
    "rank": "b32 [{m}], 1",
    "box_dim0": f"b32 [{{m}}], 0, {BOX[1]}",
    "box_dim1": f"b32 [{{m}}], 1, {BOX[0]}",
    "global_dim0": f"b32 [{{m}}], 0, {COLS}",
    "global_dim1": f"b32 [{{m}}], 1, {ROWS}",
    "global_stride": f"b64 [{{m}}], 0, {4 * COLS}",
    "element_stride0": "b32 [{m}], 0, 1",
    "element_stride1": "b32 [{m}], 1, 1",
    "elemtype": "b32 [{m}], 0x3",
    "interleave_layout": "b32 [{m}], 0x0",
    "swizzle_mode": "b32 [{m}], 0x0",
    "fill_mode": "b32 [{m}], 0x0",
}


def replace(space="shared::cta", m="m", **changes):
    return "\n".join(
        f"@!q tensormap.replace.tile.{name.rstrip('01')}.{space}.b1024."
        f"{changes.get(name, value).format(m=m)};"
        for name, value in FIELDS.items())


COPY = """bar.warp.sync -1;
@!p tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [map], [m], 128;
"""
ACQUIRE = "@!p fence.proxy.tensormap::generic.acquire.gpu [map], 128;"
RELEASE = "@!p fence.proxy.tensormap::generic.release.gpu;"
MEET = "bar.sync 0;"
# The last warp's first thread copies; every thread stores one element.
USE = """setp.ne.u32 q, x, 32;
@!q mbarrier.init.shared.b64 [b], 1; @!q fence.proxy.async;
@!q mbarrier.arrive.expect_tx.shared.b64 _, [b], {bytes};
@!q cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [s], [map, {{4, 2}}], [b];
bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared.b64 q, [b], 0; @!q bra WAIT;
shl.b32 t, x, 2; add.u32 s, s, t; setp.ge.u32 p, t, {bytes}; @p bra END; ld.shared.b32 v, [s];
cvt.u64.u32 at, t; add.u64 at, at, out; st.global.b32 [at], v;
END:"""


def launch(body, used=BOX, seed=0, version="8.6", scratch=None, **options):
    text = entry({"pin": "u64", "pout": "u64", "pmap": "u64"}, REGISTERS,
                 BEGIN + body + USE.format(bytes=4 * used[0] * used[1]), shared=SHARED)
    text = text.replace(".version 8.6", f".version {version}")
    x = np.arange(ROWS * COLS, dtype=np.int32).reshape(ROWS, COLS)
    out = np.zeros(used, np.int32)
    scratch = np.zeros(128, np.uint8) if scratch is None else scratch
    report = sim.launch(text, "k", 1, 64, [x, out, scratch], seed=seed, **options)
    return report, out, x


def kinds(*parts, seeds=range(4)):
    return {f.kind for seed in seeds for policy in (0, 1)
            for f in launch("".join(parts), seed=seed, policy=policy)[0].findings}


BUILD = (ZERO, replace())


@pytest.mark.parametrize("seed", range(4))
def test_a_map_built_in_shared_memory(seed):
    """As tl.make_tensor_descriptor does."""
    report, out, x = launch("".join((*BUILD, COPY, ACQUIRE, MEET)), seed=seed, policy=seed % 2)
    assert report.ok, str(report)
    assert (out == x[2:6, 4:12]).all()


@pytest.mark.parametrize("staged, target, kinds", [
    (0, 0, set()), (64, 0, set()), (0, 64, set()), (32, 0, {"align"}), (0, 32, {"align"})])
def test_a_map_begins_at_a_multiple_of_64_bytes(staged, target, kinds):
    """As the CUDA driver asks; the PTX ISA says nothing of these operands."""
    shift = f"add.u32 m, m, {staged}; add.u32 t, t, {staged};"
    scratch = np.zeros(192, np.uint8)[target:target + 128]
    report, out, x = launch("".join((shift, *BUILD, COPY, ACQUIRE, MEET)), scratch=scratch)
    assert {f.kind for f in report.findings} == kinds and (out == x[2:6, 4:12]).all(), str(report)
    used = any("cp.async.bulk.tensor" in f.message.split("`")[1] for f in report.findings)
    assert used == (target == 32)


@pytest.mark.parametrize("space", ["global", ""])
def test_a_map_changed_in_global_memory(space):
    zero = """mul.wide.u32 at, x, 4; add.u64 at, at, map; mov.u32 v, 0; @!p st.global.b32 [at], v;
        bar.warp.sync -1;"""
    body = replace(space or "global", "map")
    body = body if space else body.replace(".global.b1024", ".b1024")
    report, out, x = launch(zero + body + RELEASE + ACQUIRE + MEET)
    assert report.ok, str(report)
    assert (out == x[2:6, 4:12]).all()
    assert "race" in {f.kind for f in launch(zero + body + ACQUIRE + MEET)[0].findings}


@pytest.mark.parametrize("parts, missing", [
    ((*BUILD, COPY, MEET), "acquire"),
    ((*BUILD, COPY, ACQUIRE), None),
    ((*BUILD, COPY, ACQUIRE.replace("[map]", "[map+128]"), MEET), "acquire"),
    ((*BUILD, COPY.replace("bar.warp.sync -1;", ""), ACQUIRE, MEET), None),
    ((ZERO.replace("bar.warp.sync -1;", ""), replace(), COPY, ACQUIRE, MEET), None),
])
def test_what_is_left_out_is_found(parts, missing):
    found = {}
    for seed in range(6):
        report = launch("".join(parts), seed=seed, policy=seed % 2)[0]
        found |= {f.message: f.kind for f in report.findings}
    assert "race" in found.values() or "bounds" in found.values()
    if missing:
        assert any(f"fence.proxy.tensormap::generic.{missing}" in text for text in found), found


@pytest.mark.parametrize("fences, clean", [(RELEASE + ACQUIRE, True), (RELEASE, False)])
def test_the_address_of_a_map_of_the_host_is_changed(fences, clean):
    whole = sim.TensorMap(np.zeros((ROWS, COLS), np.int32), [BOX[1], BOX[0]])
    scratch = np.frombuffer(whole.encode(0), np.uint8).copy()
    change = f"@!q tensormap.replace.tile.global_address.global.b1024.{FIELDS['global_address']};"
    report, out, x = launch(change.format(m="map") + fences + MEET, scratch=scratch)
    assert report.ok == clean and (out == x[2:6, 4:12]).all(), str(report)


@pytest.mark.parametrize("version, units, right", [("8.3", 1, False), ("8.3", 16, True),
                                                   ("8.6", 1, True), ("8.6", 16, False)])
def test_units_of_strides(version, units, right):
    stride = f"b64 [{{m}}], 0, {4 * COLS // units}"
    body = "".join((ZERO, replace(global_stride=stride), COPY, ACQUIRE, MEET))
    report, out, x = launch(body, version=version)
    assert (report.ok and (out == x[2:6, 4:12]).all()) == right


@pytest.mark.parametrize("field, value, complaint", [
    ("box_dim0", "b32 [{m}], 0, 257", "box extent"),
    ("box_dim1", "b32 [{m}], 1, 0", "box extent"),
    ("global_dim1", "b32 [{m}], 1, 0", "every dimension"),
    ("global_stride", "b64 [{m}], 0, 8", "outer stride"),
    ("elemtype", "b32 [{m}], 0x20", "element type"),
    ("element_stride1", "b32 [{m}], 1, 9", "element stride"),
    ("swizzle_mode", "b32 [{m}], 0x7", "swizzle"),
    ("interleave_layout", "b32 [{m}], 0x1", "interleaved"),
    ("rank", "b32 [{m}], 2", "rank 2, found rank 3"),
])
def test_a_map_that_is_wrong_is_found_at_its_use(field, value, complaint):
    extra = ""
    if field == "rank":  # or the third dimension is wrong, too
        extra = "".join(f"@!q tensormap.replace.tile.{f}.shared::cta.b1024.b32 [m], 2, 1;"
                        for f in ("box_dim", "global_dim", "element_stride"))
    body = "".join((ZERO, replace(**{field: value}), extra, COPY, ACQUIRE, MEET))
    report = launch(body)[0]
    assert any(f.kind == "bounds" and complaint in f.message for f in report.findings), str(report)


def test_there_is_no_stride_of_a_fifth_outer_dimension():
    stride = "@!q tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [m], 4, in;"
    with pytest.raises(sim.PtxError, match="dimension from 0 to 3, found 4"):
        launch(stride)


def test_memory_that_is_no_map_is_found():
    assert {"uninit", "bounds"} & kinds(replace(), COPY, ACQUIRE, MEET, seeds=[0])
    garbage = ZERO.replace("mov.u32 v, 0;", "mov.u32 v, 7;")
    assert "bounds" in kinds(garbage, replace(), COPY, ACQUIRE, MEET, seeds=[0])


# ---------------------------------------------------------------- element strides


@pytest.mark.parametrize("step", [1, 2, 3])
def test_element_strides(step):
    rows, cols, box_rows = 21, 16, 7
    taken = -(-box_rows // step)
    x = np.arange(rows * cols, dtype=np.int32).reshape(rows, cols)
    text = entry({"pin": "align 64 .b8", "pout": "u64"}, REGISTERS, f"""
        ld.param.u64 out, [pout]; mov.u64 map, pin; cvta.param.u64 map, map;
        mov.u32 x, %tid.x; mov.u32 s, tile; mov.u32 b, bar; setp.ne.u32 q, x, 0;
        @!q mbarrier.init.shared.b64 [b], 1; @!q fence.proxy.async;
        @!q mbarrier.arrive.expect_tx.shared.b64 _, [b], {taken * 32};
        @!q cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [s], [map, {{4, 17}}], [b];
        bar.sync 0; WAIT: mbarrier.try_wait.parity.shared.b64 q, [b], 0; @!q bra WAIT;
        shl.b32 t, x, 2; add.u32 s, s, t; setp.ge.u32 p, t, {taken * 32}; @p bra END;
        ld.shared.b32 v, [s]; cvt.u64.u32 at, t; add.u64 at, at, out; st.global.b32 [at], v; END:
        """, shared=SHARED).replace(".b8 pin,", ".b8 pin[128],")
    out = np.full((taken, 8), -1, np.int32)
    report = sim.launch(text, "k", 1, 64, [
        sim.TensorMap(x, [8, box_rows], element_strides=[1, step]), out])
    assert report.ok, str(report)
    padded = np.vstack([x, np.zeros((8, cols), np.int32)])
    assert (out == padded[17:17 + box_rows:step, 4:12]).all()


@pytest.mark.parametrize("strides", [[1, 0], [1, 9], [0, 1]])
def test_element_strides_that_the_driver_refuses(strides):
    x = np.zeros((8, 16), np.int32)
    with pytest.raises(ValueError, match="element stride to be in"):
        sim.TensorMap(x, [8, 4], element_strides=strides).encode(0)
