"""`moe explain --op`: every argument of every op leads from torch to a line that reads it."""

import json
import re

import pytest
import torch
from support import BUILD, run_python

import moe_mlir
import moe_mlir_command
from moe_mlir import experts  # noqa: F401  registers the ops of experts
from moe_mlir._support.paths import PACKAGE
from moe_mlir.cli import op_arguments
from moe_mlir.sim.simulation import intercept
from moe_mlir_bench.gpu_check import cases
from moe_mlir_bench.gpu_check.pack import _Recorder

OPS = sorted({schema.name.partition("::")[2] for schema in torch._C._jit_get_all_schemas()
              if schema.name.startswith("moe::")
              and (PACKAGE / "ops" / f"{schema.name.partition('::')[2]}.py").exists()})


@pytest.mark.parametrize("op", OPS)
def test_every_argument_has_its_way(op):
    root = op_arguments.source_tree()
    for argument, stations in op_arguments.arguments(op).items():
        assert stations, f"{argument} is nothing in moe.{op}: say what in op_arguments.py"
        for station in stations:
            if station.name in (op_arguments.SHAPE, op_arguments.TYPE):
                continue
            found = station.readers + station.same_name
            assert found, f"nothing reads {station.name} of moe.{station.op}"
            accessor = "get" + station.name.replace("_", "")
            for place in found:
                path, _, line = place.rpartition(":")
                text = (root / path).read_text().splitlines()[int(line) - 1]
                assert accessor.lower() in text.lower(), place


@pytest.mark.parametrize("op", cases.OPS)
def test_a_call_makes_the_ops_that_are_named(op):
    recorder = _Recorder()
    with intercept(recorder):
        cases.OPS[op](moe_mlir, cases.operands())
    (text,) = recorder.texts
    made = set(re.findall(r"= moe\.(\w+)", text))
    assert made == set(op_arguments.OPS_IN_IR.get(op, (op,)))


def test_no_name_is_said_of_what_is_not_there():
    for op, argument in op_arguments.NAMES_OF_OP:
        assert argument in op_arguments.arguments(op), (op, argument)
    named = {a for op in OPS for a in op_arguments.arguments(op)}
    assert set(op_arguments.NAMES) <= named


@pytest.fixture
def explain(capsys):
    """`moe explain` in this process, which has torch: (status, output, errors)."""
    def run(*arguments):
        try:
            status = moe_mlir_command.main(["explain", *arguments])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err
    return run


def test_the_command():
    done = run_python(BUILD / "bin" / "moe", "explain", "--op", "similarity_inform")
    assert done.returncode == 0, done.stderr
    assert "-> moe.similarity_inform (include/MoE/Dialect/MoE/IR/MoEMixingOps.td:" in done.stdout
    assert re.search(r"\ncausal\n  moe.similarity_inform: visibility\n    read at lib/", done.stdout)


def test_json_and_wrong_arguments(explain):
    status, output, _ = explain("--op", "topk_renorm", "--json")
    listed = json.loads(output)
    assert status == 0
    assert listed["k"][0]["name"] == op_arguments.SHAPE and listed["renorm"][0]["readers"]
    status, _, errors = explain("--op", "topk")
    assert status == 2 and "expected an op of torch.ops.moe" in errors
    assert "found neither" in explain()[2]
    assert "found both" in explain("Mixtral", "--op", "topk_renorm")[2]
