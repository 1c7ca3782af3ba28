"""Calls are read by schema, and nothing matches on arguments that it does not name."""

from pathlib import Path

import pytest
import torch

from moe_mlir import raising
from moe_mlir.raising.memory import Writes
from moe_mlir.raising.reading import read

aten = torch.ops.aten
# What compares, copies or rewrites whole argument lists.
WHOLE = {"attention.py", "before_autograd.py", "decompose_calls.py", "expert_activations.py",
         "fold_layers.py", "functional.py", "grad_modes.py", "memory.py", "reading.py"}


@pytest.fixture
def graph():
    return torch.fx.Graph()


def tensor(graph, name="x"):
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(4, 8)
    return node


def test_an_argument_that_is_not_named_is_refused(graph):
    x = tensor(graph)
    plain = graph.call_function(aten.add.Tensor, (x, x), {"alpha": 1})
    scaled = graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2})
    assert read(plain, {aten.add.Tensor}, "other").other is x
    assert read(scaled, {aten.add.Tensor}, "other") is None
    assert read(scaled, {aten.add.Tensor}, "other", "alpha").alpha == 2
    assert read(plain, {aten.add.Tensor}) is None  # a tensor is an argument, too
    assert read(plain, {aten.sub.Tensor}, "other") is None


def test_defaults_are_filled_in_and_places_do_not_matter(graph):
    x = tensor(graph)
    selected = read(graph.call_function(aten.topk.default, (x,), {"k": 2}), {aten.topk.default},
                    "k", "dim", "largest", "sorted")
    assert (selected.k, selected.dim, selected.largest, selected.sorted) == (2, -1, True, True)
    copy = graph.call_function(aten.clone.default, (x,),
                               {"memory_format": torch.contiguous_format})
    assert read(copy, {aten.clone.default}).source is x


def test_a_cast_to_another_device_is_none(graph):
    x = tensor(graph)
    moved = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64})
    moved.meta["val"] = torch.empty(4, 8, dtype=torch.float64, device="meta")
    assert read(moved, {aten._to_copy.default}, "dtype") is None


def test_a_write_through_an_out_argument_is_seen(graph):
    x, out = tensor(graph), tensor(graph, "out")
    start = graph.call_function(aten.neg.default, (out,))
    view = graph.call_function(aten.view.default, (start, [32]))
    graph.call_function(aten.add.out, (x, x), {"out": start})
    end = graph.call_function(aten.exp.default, (view,))
    writes = Writes(graph)
    assert writes.disturb([end], [view]) and not writes.disturb([view], [start])


def test_patterns_look_at_arguments_through_read_alone():
    for path in Path(raising.__file__).parent.glob("*.py"):
        if path.name not in WHOLE:
            code = path.read_text()
            assert ".args[" not in code and ".kwargs" not in code, path.name
