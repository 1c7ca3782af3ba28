"""python/dialect: the dialect in MLIR's own Python package, built over this build.

Each test is a process of its own, as MLIR's package and the compiler of moe_mlir are never in one.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import run_tool

import moe_mlir

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(moe_mlir.__file__).absolute().parents[2]
PROJECT = ROOT / "python" / "dialect"
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

import dialect  # noqa: E402


def bindings():
    """The folder of MLIR's Python package, beside which is that of LLVM."""
    spec = importlib.util.find_spec("mlir")
    for folder in spec.submodule_search_locations if spec else ():
        if (Path(folder) / "_mlir_libs" / "libMLIRPythonCAPI.so").exists():
            return Path(folder)
    pytest.skip("MLIR's Python package is not installed; requirements.txt pins it")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    found = bindings()
    if not (BUILD / "lib" / "cmake" / "moe" / "MoEConfig.cmake").exists():
        pytest.skip("the libraries of the compiler are not in this build")
    folder = tmp_path_factory.mktemp("dialect")
    cmake = shutil.which("cmake") or pytest.skip("no cmake")
    for command in ([cmake, "-G", "Ninja", "-S", PROJECT, "-B", folder,
                     f"-DMoE_DIR={BUILD / 'lib' / 'cmake' / 'moe'}",
                     f"-DMOE_MLIR_LIBS={found / '_mlir_libs'}"], [cmake, "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    paths = [str(folder), str(found.parent), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))


def python(environment, code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=environment,
                          capture_output=True, text=True, timeout=120)


def printed(environment, code, *arguments):
    done = python(environment, code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_builds_a_router_that_the_compiler_runs(environment, tmp_path):
    done = subprocess.run([sys.executable, PROJECT / "router.py"], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "moe.router_logits" in done.stdout and "moe.topk_renorm" in done.stdout
    (tmp_path / "router.mlir").write_text(done.stdout)
    compiled = run_tool("moe-compile", "router.mlir", "-o", "router.artifact", cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    torch.manual_seed(0)
    h, weight = torch.randn(5, 64), torch.randn(16, 64)
    gates, indices = moe_mlir.load(tmp_path / "router.artifact")(h, weight)
    top, experts = (h.double() @ weight.double().T).topk(2)
    assert torch.equal(indices.long(), experts)
    torch.testing.assert_close(gates.double(), top.softmax(-1), rtol=0, atol=4e-6)


def test_every_op_of_the_dialect_has_a_class(environment):
    code = """
from mlir.dialects import moe
print(*sorted(c.OPERATION_NAME for c in vars(moe).values() if hasattr(c, "OPERATION_NAME")))"""
    families = [path.stem for path in dialect.DIALECT.glob("*Op*.td")]
    wanted = {op for family in families for op in dialect.ops_of(family)}
    assert set(printed(environment, code).split()) == wanted and len(wanted) > 30


SELECT = """
import sys
from mlir import ir
from mlir.dialects import moe, tensor

def select(k, **attributes):
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        scores = tensor.empty([4, 8], f32)
        moe.topk_renorm([ir.RankedTensorType.get([4, k], t) for t in (f32, i32)], scores,
                        [tensor.empty([4, k], f32), tensor.empty([4, k], i32)], **attributes)
    return module
"""


def test_attributes_are_texts_or_members_of_enums(environment):
    code = SELECT + """
with ir.Context(), ir.Location.unknown():
    for score in ("sigmoid", moe.ScoreFunction.Sigmoid):
        module = select(2, score=score, kind=moe.ScoreKind.Logits, n_group=4, topk_group=2,
                        group_score="max", renorm=False, route_scale=2.5)
        module.operation.verify()
        print(str(module.body.operations[3]).partition("{")[2].partition("}")[0])
        op = module.body.operations[3]
        print(type(op).__name__, op.scores.type, op.n_group.value, op.select_bias)
"""
    first, *rest = printed(environment, code).splitlines()
    for written in ("score = #moe.score_function<sigmoid>", "n_group = 4", "renorm = false",
                    "group_score = #moe.group_score<max>", "route_scale = 2.5"):
        assert written in first
    assert rest == ["TopKRenormOp tensor<4x8xf32> 4 None", first, rest[0]]


def test_what_the_verifier_refuses_is_an_exception_with_its_reason(environment):
    code = SELECT + """
with ir.Context(), ir.Location.unknown():
    try:
        select(9).operation.verify()
    except ir.MLIRError as error:
        print(error)
"""
    assert re.search(r"'moe.topk_renorm' op expected .*9", printed(environment, code))


def test_our_pipelines_run_and_text_is_parsed(environment):
    code = """
import sys
from mlir import ir
from mlir.dialects import moe
from mlir.passmanager import PassManager
with ir.Context():
    module = ir.Module.parse(open(sys.argv[1]).read())
    PassManager.parse("builtin.module(moe-to-cpu)").run(module.operation)
    print(module)
"""
    shown = printed(environment, code, ROOT / "examples" / "deploy" / "router.mlir")
    assert "llvm.func @route" in shown and "moe.router_logits" not in shown


def test_an_earlier_context_learns_the_dialect(environment):
    code = """
from mlir import ir
with ir.Context() as context, ir.Location.unknown():
    try:
        context.dialects["moe"]
    except IndexError as error:
        print(error)
    from mlir.dialects import moe
    moe.register_dialect(context)
    print(context.dialects["moe"])
"""
    first, second = printed(environment, code).splitlines()
    assert "moe" in first and "class mlir.dialects._moe_ops_gen._Dialect" in second


def test_it_refuses_a_process_that_has_the_compiler(environment):
    done = python(environment, "import moe_mlir._native as n; n.native()\nfrom mlir.dialects import moe")
    assert done.returncode != 0
    assert "found the compiler of moe_mlir already loaded" in done.stderr
    done = python(environment, "from mlir.dialects import moe\nimport moe_mlir._native as n; n.native()")
    assert done.returncode != 0 and "in separate processes and exchange IR as text" in done.stderr
