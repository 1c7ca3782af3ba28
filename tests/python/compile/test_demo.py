"""What `./run` measures and prints."""

import dataclasses

import torch

from moe_mlir_bench.demo import compare, inductor, report


def make_comparison(**values):
    return compare.Comparison("smoe", 1e-7, 4, 0, 3.0, 2.5, 2.0, "", [], **values)


def test_the_table_has_the_times_of_all():
    heading, _, row = report.table([make_comparison()]).splitlines()
    names = [name.strip() for name in heading.split("  ") if name]
    assert names[2:6] == ["eager ms", "Inductor ms", "compiled ms", "speed-up"]
    assert row.split()[2:6] == ["3.00", "2.50", "2.00", "1.50x"]


def test_a_rival_without_a_time_is_a_dash():
    without = dataclasses.replace(make_comparison(), inductor_ms=None, inductor_reason="a reason")
    assert report.table([without]).splitlines()[-1].split()[2:5] == ["3.00", "-", "2.00"]


def test_a_model_that_inductor_compiled_is_timed():
    layers, inputs = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(2, 4)
    compiled, reason = inductor.compile_inductor(layers, inputs, "smoe")
    assert reason == "" and torch.allclose(compiled["inductor"](inputs), layers(inputs))
    assert set(compare.time_in_turns({"eager": layers, **compiled}, inputs)) == {"eager", "inductor"}


def test_why_inductor_refuses_is_its_own_reason():
    compiled, reason = inductor.compile_inductor(torch.nn.Linear(4, 4), torch.zeros(2, 9), "smoe")
    assert compiled == {} and "Error: " in reason


def test_all_take_turns():
    order = []
    calls = {name: lambda x, name=name: order.append(name) for name in ("eager", "compiled")}
    times = compare.time_in_turns(calls, torch.zeros(1))
    assert set(times) == set(calls) and order[:4] == ["eager", "compiled"] * 2
