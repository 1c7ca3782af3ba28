"""The model of time: what it holds our kernels to, and what it is built from."""

import dataclasses
import functools
import sys
from pathlib import Path

import pytest

import moe_mlir

sys.path.append(str(Path(__file__).resolve().parents[3] / "utils"))
from gpu_model import calls, chips, kernel_time, recorded, sass, timeline

try:
    sass.find_tool("ptxas"), sass.find_tool("nvdisasm")
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


def named(text):
    (call,) = [call for call in calls.CALLS if text in call.name]
    return call


# Few bytes are no merit if 8 of 132 multiprocessors move them, one after the other.
@pytest.mark.drawn(6)
@pytest.mark.parametrize("name, size, launches, sms, kilobytes, microseconds", [
    ("topk_renorm 16384x128", 16384, 1, 132, 3.0, 4.4),
    ("topk_renorm 8192x256", 8192, 1, 132, 3.3, 4.2),
    ("grouped_topk 8192x256", 8192, 1, 132, 2, 13.6),
    ("adjacency_update 16384", 16384, 2, 120, 0.6, 7.2),
    ("mad_dispersion 16384x512", 16384, 1, 96, 4.5, 32),
    ("router 32x7168 E256", 32, 2, 32, 6, 6.6),
    ("router 1x7168", 1, 2, 1, 5, 6.6),
    ("router 32x7168 -> 256 sigmoid", 32, 2, 32, 5, 7),
    ("router 16384x7168", 16384, 1, 132, 17, 300),
    ("dispatch 64 k8", 64, 1, 1, 0.5, 4.6),
    ("dispatch 8192 k8", 8192, 2, 128, 0.5, 7.2),
    ("dispatch 16384 k8", 16384, 2, 132, 0.5, 10),
    ("topk_renorm, dispatch", 8192, 3, 128, 0.5, 10),
    ("token_rows", 16384, 2, 132, 2, 5.2),
    ("combine 64", 64, 1, 128, 4, 3.6),
    ("combine 2048", 2048, 1, 132, 20, 21),
])
def test_calls_hold_their_time(name, size, launches, sms, kilobytes, microseconds):
    call = named(name)
    call = call if size == call.size else dataclasses.replace(call, size=size, simulated=())
    time = recorded.time_call(recorded.record(call), chips.H200)
    assert time.launches <= launches
    assert time.longest.used_sms >= sms
    assert time.longest.bytes_in_flight >= 1024 * kilobytes
    assert 1e6 * time.seconds <= microseconds


@pytest.mark.parametrize("tokens", [1, 32])
def test_few_tokens_fill_the_chip_with_weights(tokens):
    call = named("router 32x7168 E256")
    record = recorded.record(dataclasses.replace(call, size=tokens, simulated=()))
    products, sums = recorded.time_call(record, chips.H200).estimates
    assert products.used_sms >= 112 and products.bytes_in_flight >= 7 * 1024
    assert sums.used_sms >= tokens
    assert all(launch.code.spilled == 0 for launch in record.launches)


def a_launch():
    (launch,) = recorded.record(named("topk_renorm 16384x128")).launches
    return launch


def test_a_cluster_more_than_fit_takes_another_round():
    launch = dataclasses.replace(a_launch(), cluster=8)
    fit, more = (kernel_time.estimate(dataclasses.replace(launch, blocks=8 * clusters), chips.H100, 0)
                 for clusters in (15, 16))
    assert fit.used_sms == more.used_sms == 120
    assert more.terms["dependences"] > fit.terms["dependences"]


def test_work_on_few_multiprocessors_takes_longer():
    launch = a_launch()
    spread, narrow = (kernel_time.estimate(dataclasses.replace(
        launch, blocks=blocks, lines={n: c * 128 / blocks for n, c in launch.lines.items()}),
        chips.H200, 0) for blocks in (128, 8))
    assert spread.used_sms == 128 and narrow.used_sms == 8
    assert narrow.terms["issue"] == pytest.approx(16 * spread.terms["issue"])
    assert narrow.seconds > 8 * spread.seconds


def test_the_tail_of_a_grid_counts():
    """One block more than the chip holds at once costs a second round."""
    launch = dataclasses.replace(a_launch(), resident=1)
    full, over = (kernel_time.estimate(dataclasses.replace(launch, blocks=blocks), chips.H200, 0)
                  for blocks in (132, 133))
    assert over.terms["dependences"] == pytest.approx(2 * full.terms["dependences"])


def test_straight_code_is_counted_as_it_is():
    """A kernel without loops issues each instruction once a warp."""
    launch = a_launch()
    assert not list(launch.code.loop_ranges())
    ((share, trace),) = launch.traces
    assert share == 1 and trace.left_out == pytest.approx(1, abs=0.02)
    issued = launch.pipe_cycles()["issue"] * chips.SCHEDULERS / launch.warps
    assert issued == pytest.approx(len(launch.code.instructions), rel=0.05)


def test_copies_of_an_unrolled_loop_share_its_count():
    """ptxas unrolls the loop over pairs by four, with a remainder of two and one."""
    call = recorded.Call("by priority", lambda size, recorder: moe_mlir.dispatch(
        recorded.randint(128, size, 8), 128, priority=recorded.randn(size)), 64)
    launch = recorded.record(call).launches[2]
    assert sum(at.name.startswith("LDG") for at in launch.code.instructions) > 4
    executed = sum(launch.lines.values()) / launch.warps  # of PTX, some of it merged by ptxas
    assert 0.6 * executed <= sum(launch.counts) <= 1.3 * executed


def test_smaller_sizes_stand_for_a_larger_one():
    call = recorded.Call("attention", functools.partial(calls.attention, 1, 2, 64), 512)
    whole, scaled = (
        recorded.time_call(recorded.record(dataclasses.replace(call, simulated=sizes)), chips.H200)
        for sizes in ((), (128, 256)))
    assert scaled.seconds == pytest.approx(whole.seconds, rel=0.05)


def test_counts_go_on_along_their_polynomial():
    counted = [{"sectors": n * n, "lines": {3: n * n, 5: 7, 9: n}} for n in (2, 3, 4)]
    assert recorded.extend(counted, (2, 3, 4), 10) == {
        "sectors": pytest.approx(100),
        "lines": {3: pytest.approx(100), 5: pytest.approx(7), 9: pytest.approx(10)}}


def test_lines_of_ptx_add_up():
    recorder = recorded.Recorder("sm_90", run=True)
    calls.router(64, 16, 2, 64, recorder)
    ((_, _, report),) = recorder.launched
    counters = report.counters
    assert sum(counters["lines"].values()) == counters["warp_instructions"]


def test_a_statement_of_several_lines_is_one():
    ptx = "ld.global.b32 %r1, [%rd1];\nmma.sync\n {%r1,\n %r2};\nL:\nret;"
    assert sass.spread({1: 4, 2: 8, 6: 1}, ptx) == {1: 4, 2: 8, 3: 8, 4: 8, 6: 1}


def test_passes_that_are_left_out_are_made_up_for():
    """Two passes of 10 cycles each in a loop of 100, each with one of 3 in a loop of 7."""
    marks, time = [], 0.0
    for _ in range(2):
        marks.append((("pass", 0), time))
        time += 4
        marks.append((("pass", 5), time))
        time += 3
        marks.append((("end", 5, 7.0), time))
        time += 3
    marks.append((("end", 0, 100.0), time))
    end, added = timeline._left_out(marks, 0)
    assert end == len(marks)
    assert time + added == pytest.approx(100 * (4 + 7 * 3 + 3))


def test_published_times():
    """A router, an attention and a copy of Triton, whose times on an H100 are known."""
    pytest.importorskip("triton")
    from gpu_model import published

    wanted = {"copy of 2^28 f32": (0.95, 1.05), "router 16384x128 k8 bf16": (0.7, 1.3),
              "router 8192x256 k8 f32": (0.7, 1.3),
              "attention 128x4096 width 128 f16": (0.8, 1.25)}
    for entry in published.all_published():
        if entry.name in wanted:
            low, high = wanted.pop(entry.name)
            modelled, _ = published.microseconds(entry)
            assert low <= modelled / entry.microseconds <= high, entry.name
    assert not wanted
