"""setmaxnreg: a block's registers are a pool that its warpgroups share."""

import numpy as np
import pytest
from ptxlib import entry

from moe_mlir import sim

REGISTERS = {"t": "b32", "out": "b64", "p": "pred"}
BEGIN = """ld.param.u64 out, [pout]; mov.u32 t, %tid.x; shr.u32 t, t, 7; setp.eq.u32 p, t, 0;
@!p bra CONSUMER;
"""


def text(producer, consumer, bounds):
    body = f"{BEGIN}{producer}\nbra END;\nCONSUMER: {consumer}\nEND:"
    return entry({"pout": "u64"}, REGISTERS, body).replace("(.param .u64 pout)\n",
                                                           f"(.param .u64 pout)\n{bounds}\n")


def findings(producer, consumer, bounds=".maxnreg 168", block=384, seeds=range(3), **options):
    module = sim.Module(text(producer, consumer, bounds))
    found = {}
    for seed in seeds:
        for policy in (0, 1):
            report = module.launch("k", 1, block, [np.zeros(1, np.uint32)], seed=seed,
                                   policy=policy, **options)
            found |= {f.kind: f.message for f in report.findings}
    return found


def dec(count):
    return f"setmaxnreg.dec.sync.aligned.u32 {count};"


def inc(count):
    return f"setmaxnreg.inc.sync.aligned.u32 {count};"


@pytest.mark.parametrize("bounds", [".maxnreg 168", ".reqntid 384\n.minnctapersm 1",
                                    ".maxntid 384, 1, 1\n.minnctapersm 1"])
def test_consumers_get_what_the_producer_gives(bounds):
    assert findings(dec(24), inc(240), bounds) == {}
    assert "deadlock" in findings(dec(40), inc(240), bounds, seeds=[0])


def test_an_increase_that_nothing_meets_waits_forever():
    found = findings(dec(32), inc(240))
    assert set(found) == {"deadlock"} and "waits for registers" in found["deadlock"]
    assert set(findings("", inc(240))) == {"deadlock"}
    # Two blocks share the SM: each has half.
    assert set(findings(dec(24), inc(120), ".reqntid 384\n.minnctapersm 2")) == {"deadlock"}
    assert findings(dec(24), inc(104), ".reqntid 384\n.minnctapersm 2") == {}


def test_without_a_register_count_nothing_is_shared():
    """ptxas: 'setmaxnreg' ignored; unable to determine register count at entry."""
    assert findings(dec(40), inc(240), ".reqntid 384") == {}


@pytest.mark.parametrize("count", [0, 16, 20, 164, 250, 264])
def test_illegal_counts_are_refused(count):
    with pytest.raises(sim.PtxError, match=f"multiple of 8 from 24 to 256, found {count}"):
        sim.Module(text(dec(count), "", ""))


def test_a_decrease_asks_for_less_and_an_increase_for_more():
    assert "bounds" in findings(dec(200), "")
    assert "bounds" in findings("", inc(120))
    assert findings(dec(168), inc(168)) == {}


def test_all_warps_of_a_warpgroup_ask_alike():
    one_warp = """mov.u32 t, %tid.x; and.b32 t, t, 127; setp.lt.u32 p, t, 32;"""
    assert "deadlock" in findings(f"{one_warp} @p bra END; {dec(24)}", "")
    assert "deadlock" in findings(f"{one_warp} @p bra OTHER; {dec(24)} bra END; "
                                  f"OTHER: {dec(24)}", "")


def test_warps_synchronise_between_two_requests():
    again = f"{dec(40)} {{}} {dec(24)}"
    assert set(findings(again.format(""), "")) == {"race"}
    assert findings(again.format("bar.sync 1, 128;"), "") == {}


@pytest.mark.parametrize("bounds", [".maxnreg 168", ".reqntid 384"])
def test_a_request_that_moves_no_register_may_be_let_pass(bounds):
    allow = ("repeated-setmaxnreg",)
    twice = dec(40) + dec(40)
    assert set(findings(twice, "", bounds)) == {"race"}
    assert findings(twice, "", bounds, allow=allow) == {}
    assert set(findings(dec(40) + dec(24), "", bounds, allow=allow)) == {"race"}
    # Nor does the repeated one order the first before the third.
    assert set(findings(twice + dec(24), "", bounds, allow=allow)) == {"race"}
    assert findings(twice + "bar.sync 1, 128;" + dec(24), "", bounds, allow=allow) == {}
