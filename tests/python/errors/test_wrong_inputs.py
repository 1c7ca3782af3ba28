"""Wrong and unsupported inputs of every kind: where it is, why, and what to do next.

A case is a function that provokes an error and returns its text, the place that
the text must name ("line of the model", "file:line:col", or None where an input
has no lines), the reason, and the next step. No case may end in a traceback of
ours, a signal, or silence.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support import BUILD, rewrite_manifest, run_python, run_tool

import moe_mlir
from moe_mlir import artifact, distributed, nn, sim
from moe_mlir._native import native
from moe_mlir.compiler import cache, jit

ROOT = Path(__file__).resolve().parents[3]
THIS = os.path.basename(__file__)
ROUTER = ROOT / "examples" / "deploy" / "router.mlir"


@dataclass
class Case:
    """`trigger(tmp_path)` returns the error's text; `where` is a regular expression."""

    trigger: object
    where: str | None
    reason: str
    next_step: str


CASES = {}


def case(reason, next_step, where=None):
    def register(trigger):
        name = trigger.__name__.replace("_", " ")
        assert name not in CASES
        CASES[name] = Case(trigger, where, reason, next_step)
        return trigger

    return register


# ------------------------------------------------------------------ provoking


def error_of(call, *args, errors=(ValueError, TypeError), **kwargs):
    with pytest.raises(errors) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def warning_of(call, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return "\n".join(str(w.message) for w in caught if w.category is RuntimeWarning)


def tool(name, *arguments, status=1, environment=None):
    done = run_tool(name, *arguments, env={**os.environ, **(environment or {})})
    assert done.returncode == status, done
    return done.stderr


def compile_text(folder, text, *options, name="in.mlir", **others):
    (folder / name).write_text(text)
    return tool("moe-compile", folder / name, "-o", folder / "out", *options, **others)


def compiled_artifact(folder, *options):
    tool("moe-compile", ROUTER, "-o", folder / "router", *options, status=0)
    return folder / "router"


def line_of(model, text):
    """What names the line of a model's forward that holds `text`."""
    source, first = inspect.getsourcelines(model.forward)
    return rf"{THIS}:{first + next(i for i, s in enumerate(source) if text in s)}\b"


# ------------------------------------------------------------------ models


class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


class Nonzero(torch.nn.Module):
    def forward(self, x):
        return torch.nonzero(x)


class Branch(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1


class Casts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer.to(torch.float64)(x.double())


class Identity(torch.nn.Module):
    def forward(self, x):
        return x + x


class Scaled(torch.nn.Module):
    def forward(self, x, factor):
        return x * factor


class Transposed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x):
        return x @ self.weight


class Dropping(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, training=True)


X = torch.ones(2, 3)


@case("bessel_j0.default: 1 use", "rewrite these lines", line_of(Bessel, "bessel_j0"))
def a_model_with_an_unsupported_operation(folder):
    return error_of(moe_mlir.export, Bessel(), (X,))


@case("aten.nonzero.default: 1 use", "rewrite these lines", line_of(Nonzero, "nonzero"))
def a_model_whose_sizes_depend_on_data(folder):
    return error_of(moe_mlir.export, Nonzero(), (X,))


@case("control flow that depends on data", "torch.cond", line_of(Branch, "if x.sum()"))
def a_model_that_branches_on_data(folder):
    return error_of(moe_mlir.export, Branch(), (X,))


@case("a forward that leaves its layers as they are", "cast their inputs", line_of(Casts, "layer.to"))
def a_model_that_casts_its_layers(folder):
    return error_of(moe_mlir.export, Casts(), (torch.ones(2, 4),))


@case("dropout.default: 1 use", "rewrite these lines", line_of(Dropping, "dropout"))
def a_model_that_drops_in_training(folder):
    return error_of(moe_mlir.export, Dropping(), (X,))


@case("dtype complex64", "input 'x'")
def a_model_of_complex_numbers(folder):
    return error_of(moe_mlir.export, Identity(), (X.to(torch.complex64),))


@case("found function", "expected 'model' to be a torch.nn.Module")
def a_function_instead_of_a_model(folder):
    return error_of(moe_mlir.compile, lambda x: x, (X,))


@case("found Tensor", "write (x,)")
def example_inputs_that_are_no_tuple(folder):
    return error_of(moe_mlir.export, Identity(), X)


@case("found none", "expected at least one tensor")
def example_inputs_without_a_tensor(folder):
    return error_of(moe_mlir.export, Identity(), (1,))


@case("found strides (1, 3)", "call .contiguous()")
def a_parameter_that_is_not_contiguous(folder):
    # When it is called: weights are read at each call, and may be others by then.
    x = torch.ones(2, 3)
    return error_of(moe_mlir.compile(Transposed(), (x,)), x)


@case("expected 'target' to be one of cpu, sm_80", "found 'sm_13'")
def a_model_compiled_for_an_unknown_chip_in_python(folder):
    return error_of(moe_mlir.compile, Identity(), (X,), target="sm_13")


@case("expected CUDA tensors for 'main', which was compiled for sm_90", "`with moe_mlir.simulate")
def a_model_for_a_chip_on_cpu_tensors(folder):
    return error_of(moe_mlir.compile(Identity(), (X,), target="sm_90"), X)


@case("found 'model.txt'", "ends in .mlir or .mlirbc")
def a_module_saved_as_something_else(folder):
    return error_of(moe_mlir.export(Identity(), (X,)).save, "model.txt")


@case("found torch.float64", "expected torch.float32")
def a_compiled_model_called_with_another_dtype(folder):
    return error_of(moe_mlir.compile(Identity(), (X,)), X.double())


@case("found [2, 4]", "expected shape")
def a_compiled_model_called_with_another_width(folder):
    return error_of(moe_mlir.compile(Identity(), (X,)), torch.ones(2, 4))


@case("found meta", "expected a CPU tensor")
def a_compiled_model_called_on_another_device(folder):
    return error_of(moe_mlir.compile(Identity(), (X,)), X.to("meta"))


@case("found 3.0", "export again with it")
def a_compiled_model_called_with_another_constant(folder):
    return error_of(moe_mlir.compile(Scaled(), (X, 2.0)), X, 3.0)


# ------------------------------------------------------------------ ops


@case("found 9", "expected 'k'")
def more_experts_than_there_are(folder):
    return error_of(moe_mlir.topk_renorm, torch.ones(3, 8), 9)


@case("found float64", "expected 'scores' to have dtype float32")
def scores_of_another_dtype(folder):
    return error_of(moe_mlir.topk_renorm, torch.ones(3, 8).double(), 2)


@case("found (4,)", "expected 'mask' to have shape")
def a_mask_of_another_size(folder):
    return error_of(moe_mlir.topk_renorm, torch.ones(3, 8), 2, mask=torch.ones(4, dtype=torch.bool))


@case("found list", "expected 'scores' to be a tensor")
def a_list_instead_of_a_tensor(folder):
    return error_of(moe_mlir.topk_renorm, [[1.0]], 1)


@case("found 'raw'", "expected 'kind' to be one of")
def an_attribute_that_is_none(folder):
    return error_of(moe_mlir.topk_renorm, torch.ones(3, 8), 2, kind="raw")


@case("found 9", "'k' in [1, 8]")
def a_router_with_too_large_a_k(folder):
    return error_of(nn.SMoE, 16, 8, 9)


@case("a capacity is of one rank's tokens", "expected a layer without capacity_factor")
def experts_on_ranks_with_a_capacity(folder):
    return error_of(distributed.ExpertParallel,
                    nn.MoELayer(nn.SMoE(4, 4, 2), 8, capacity_factor=1.0))


# ------------------------------------------------------------------ IR and moe-compile


@case("No such file", "cannot read")
def moe_compile_without_its_file(folder):
    return tool("moe-compile", folder / "none.mlir", "-o", folder / "out")


@case("expected ':'", "tensor.dim %x", r"in\.mlir:2:\d+: error")
def ir_with_a_syntax_error(folder):
    return compile_text(folder, "func.func @f(%x: tensor<?xf32>, %c: index) {\n  tensor.dim %x, %c\n}")


@case("moe.frobnicate", "unregistered", r"in\.mlir:2:\d+: error")
def ir_with_an_unknown_op(folder):
    return compile_text(folder, 'func.func @f() {\n  "moe.frobnicate"() : () -> ()\n  return\n}')


@case("(32)", "expected", r"router\.mlir:12:\d+: error")
def ir_that_chooses_more_experts_than_there_are(folder):
    text = ROUTER.read_text().replace("x2x", "x32x").replace("?x2", "?x32")
    (folder / "router.mlir").write_text(text)
    return tool("moe-compile", folder / "router.mlir", "-o", folder / "out")


@case("found bytecode", "--allow-bytecode", r"in\.mlirbc:1:1: error")
def bytecode_that_nobody_trusts(folder):
    data = native().Module.parse("module {}").bytecode()
    (folder / "in.mlirbc").write_bytes(data)
    return tool("moe-compile", folder / "in.mlirbc", "-o", folder / "out")


@case("expected at most 256 levels", "raise the nesting limit", r"in\.mlir:1:\d+: error")
def ir_nested_too_deeply(folder):
    return compile_text(folder, "module {" * 300 + "}" * 300)


@case("found 'tensor<", "at most 2^62 bytes", r"in\.mlir:1:\d+: error")
def ir_with_a_type_larger_than_memory(folder):
    return compile_text(folder, "func.func @f(%x: tensor<9223372036854775807x3xf32>) { return }")


@case("found none in the module", "expected a public function", r"in\.mlir")
def ir_without_a_function(folder):
    return compile_text(folder, "module {}")


@case("found 'sm_999'", "expected a chip out of sm_80")
def an_unknown_chip(folder):
    return compile_text(folder, "module {}", "--target=sm_999")


@case("found cpu", "expected a chip as --target")
def ptx_for_a_cpu(folder):
    return compile_text(folder, "module {}", "--emit=ptx")


@case("found sm_90", "use --emit=ptx")
def assembly_for_a_gpu(folder):
    return compile_text(folder, "module {}", "--target=sm_90", "--emit=asm")


@case("found 'pentium9'", "or 'native'")
def an_unknown_cpu(folder):
    return compile_text(folder, ROUTER.read_text(), "--cpu=pentium9")


@case("found '-'", "expected a folder name with -o")
def an_artifact_on_standard_output(folder):
    return tool("moe-compile", ROUTER, "-o", "-")


@case("found something else", "expected")
def an_artifact_over_a_folder_of_something_else(folder):
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").write_text("years")
    return compile_text(folder, ROUTER.read_text())


@case("cannot", "/proc/none")
def an_output_that_cannot_be_written(folder):
    return tool("moe-compile", ROUTER, "-o", "/proc/none/out")


@case("found none in MOE_MLIR_PTXAS", "install the nvidia-cuda-nvcc wheel")
def a_cubin_without_ptxas(folder):
    return compile_text(folder, ROUTER.read_text(), "--target=sm_90", "--emit=cubin",
                        environment={"MOE_MLIR_PTXAS": "/none", "PATH": "/none"})


@case("found none that can be read", "expected a program of torch.export.save", r"model\.pt2: error")
def a_torch_program_that_is_none(folder):
    (folder / "model.pt2").write_text("nothing")
    return tool("moe-compile", folder / "model.pt2", "-o", folder / "out")


@case("found 'pentium9'", "compile it again with `moe-compile")
def a_torch_program_that_does_not_compile(folder):
    torch.export.save(torch.export.export(Identity(), (X,)), folder / "model.pt2")
    text = tool("moe-compile", folder / "model.pt2", "-o", folder / "out", "--cpu=pentium9")
    assert "func.func" in (folder / "out.failed.mlir").read_text()
    return text


@case("expected a pass pipeline", "does not refer to a registered pass")
def an_unknown_pass(folder):
    return error_of(native().Module.parse("module {}").run, "moe-no-such-pass")


@case("Unknown command line argument", "--help")
def an_unknown_option(folder):
    return tool("moe-compile", ROUTER, "-o", folder / "out", "--no-such-option")


@case("expected", "moe reproduce", r"-:1:\d+: error")
def a_module_of_ours_that_does_not_compile(folder):
    return error_of(jit.compile_cached, "func.func @f( {")


# ------------------------------------------------------------------ artifacts


def damaged(change, name="kernel.o"):
    def trigger(folder):
        path = compiled_artifact(folder) / name
        change(path)
        return error_of(artifact.load, path.parent) + tool("moe-run", path.parent, "--list")

    return trigger


def truncate(path):
    path.write_bytes(path.read_bytes()[:500])


def rewrite(**fields):
    def change(path):
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({**manifest, **fields}))

    return change


CASES["a truncated artifact"] = Case(damaged(truncate), r"kernel\.o", "is damaged",
                                     "compile it again")
CASES["an artifact without its code"] = Case(
    damaged(lambda path: path.unlink()), r"kernel\.o", "No such file", "expected 'kernel.o'")
CASES["an artifact of another version"] = Case(
    damaged(rewrite(format_version=9), "manifest.json"), r"manifest\.json", "found 9",
    "compile again with this version")
CASES["a manifest that is no JSON"] = Case(
    damaged(lambda path: path.write_text("{\n no"), "manifest.json"), r"manifest\.json:2",
    "expected JSON", "expected")


@case("No such file", "expected an artifact folder")
def an_artifact_that_is_not_there(folder):
    return error_of(artifact.load, folder / "none")


@case("which has", "compile it here")
def an_artifact_for_another_cpu(folder):
    absent = next(f[1:] for f in native().host_cpu()[1].split(",") if f.startswith("-"))
    path = compiled_artifact(folder)
    rewrite_manifest(path, lambda m: m["target"].update(features=f"+{absent}"))
    return error_of(artifact.load, path)


@case("compiled for sm_90, found none", "expected CUDA tensors")
def a_gpu_artifact_called_on_the_cpu(folder):
    call = artifact.load(compiled_artifact(folder, "--target=sm_90"))
    return error_of(call, torch.zeros(3, 64), torch.zeros(16, 64))


@case("found 1", "expected 2 arguments for 'route'")
def an_artifact_called_with_too_few_arguments(folder):
    return error_of(artifact.load(compiled_artifact(folder)), torch.zeros(3, 64))


@case("cannot run kernels on a GPU", "libcuda.so.1")
def a_gpu_without_a_driver(folder):
    from moe_mlir.gpu import cuda

    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    return error_of(cuda.Runtime, "cuda", errors=cuda.GpuError)


@case("found f64[3, 64]", "f32[?, 64]")
def an_artifact_run_on_another_dtype(folder):
    np.save(folder / "h.npy", np.zeros((3, 64)))
    np.save(folder / "w.npy", np.zeros((16, 64), np.float32))
    return tool("moe-run", compiled_artifact(folder), "--input", folder / "h.npy", "--input",
                folder / "w.npy")


@case("bytes after the header, found", "h.npy")
def an_artifact_run_on_a_truncated_array(folder):
    np.save(folder / "h.npy", np.zeros((3, 64), np.float32))
    (folder / "h.npy").write_bytes((folder / "h.npy").read_bytes()[:200])
    return tool("moe-run", compiled_artifact(folder), "--input", folder / "h.npy")


# ------------------------------------------------------------------ the simulator


PTX = """.version 7.8
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 x) {
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [x];
  ret;
}
"""


@case("found 'ret'", "expected ',' or ';'", r"line 7")
def ptx_with_a_syntax_error(folder):
    return error_of(sim.Module, PTX.replace("[x];", "[x]"), errors=sim.PtxError)


@case("found 'other'", "(kernel)")
def a_kernel_that_is_not_there(folder):
    return error_of(sim.launch, PTX, "other", 1, 32, [np.zeros(4)])


@case("found 2", "expected 1 arguments for kernel kernel")
def a_kernel_with_too_many_arguments(folder):
    return error_of(sim.launch, PTX, "kernel", 1, 32, [np.zeros(4), 1])


@case("found strides", "pass numpy.ascontiguousarray")
def an_array_that_is_not_contiguous(folder):
    return error_of(sim.launch, PTX, "kernel", 1, 32, [np.zeros((4, 4)).T[1:]])


@case("found 'sm_1'", "expected a chip among sm_80")
def a_simulated_chip_that_is_none(folder):
    return error_of(moe_mlir.simulate(chip="sm_1").__enter__)


@case("found an older one", "expected a CUDA driver of version 12 or later")
def a_gpu_with_an_old_driver(folder):
    """A libcuda that has the functions of the first versions alone."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "driver.c").write_text("int cuInit(unsigned flags) { return 0; }")
    subprocess.run([compiler, "-shared", "-fPIC", folder / "driver.c", "-o",
                    folder / "libcuda.so.1"], check=True)
    code = "from moe_mlir.gpu import cuda\ntry: cuda.Runtime('cuda')\nexcept cuda.GpuError as e: print(e)"
    done = run_python("-c", code, fresh=True, env={
        **os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(BUILD / "python")})
    return done.stdout + done.stderr


# ------------------------------------------------------------------ the environment


def with_cache(monkeypatch_environment):
    """The warning of a compilation under these variables."""
    old = dict(os.environ)
    os.environ.update(monkeypatch_environment)
    try:
        return warning_of(cache.open_default)
    finally:
        os.environ.clear()
        os.environ.update(old)


@case("compiling without a disk cache", "/proc/none")
def a_cache_that_cannot_be_written(folder):
    return with_cache({"MOE_MLIR_CACHE_DIR": "/proc/none"})


@case("to be writable by its owner alone", "run `chmod 700")
def a_cache_that_others_can_write(folder):
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    return with_cache({"MOE_MLIR_CACHE_DIR": str(folder / "open")})


@case("is damaged", "compiling again", r"\.code")
def a_damaged_cache_entry(folder):
    store = cache.Cache(folder / "own")
    store.store("k", b"payload")
    (store.folder / "k.code").write_bytes(b"x")
    return warning_of(store.load, "k")


@case("found 'many'", "to be a number of bytes")
def a_cache_size_that_is_no_number(folder):
    return with_cache({"MOE_MLIR_CACHE_SIZE": "many"})


@case("found chatter", "expected MOE_MLIR_LOGS to hold cache, compile, remarks or all")
def a_log_topic_that_is_none(folder):
    from moe_mlir._support import log

    return warning_of(log.show, "chatter")


@case("found MOE_MLIR_CACHEDIR", "did you mean MOE_MLIR_CACHE_DIR?")
def a_variable_with_a_typing_error(folder):
    from moe_mlir._support import environment

    return "\n".join(environment.unknown({"MOE_MLIR_CACHEDIR": "x", "PATH": "y"}))


@case("expected", "moe-compile compiles any MLIR text")
def a_reproducer_that_is_none(folder):
    (folder / "in.mlir").write_text("module {}")
    done = run_python("-m", "moe_mlir.compiler.crash_report", folder / "in.mlir")
    assert done.returncode == 1
    return done.stderr


@case("found none", "MOE_MLIR_DUMP_DIR")
def phases_of_a_folder_without_any(folder):
    from moe_mlir.compiler import phases

    return error_of(phases.read_folder, folder)


@pytest.mark.parametrize("name", list(CASES))
def test_wrong_input(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MOE_MLIR_REPRODUCER_DIR", str(tmp_path / "reproducers"))
    monkeypatch.setattr(cache, "_warned", set())
    one = CASES[name]
    text = one.trigger(tmp_path)
    assert one.reason in text, text
    assert one.next_step in text, text
    if one.where:
        assert re.search(one.where, text), text
    assert "Traceback" not in text
    assert "/lib/" not in text.replace(str(tmp_path), ""), f"names a file of ours: {text}"


def test_there_are_forty():
    assert len(CASES) >= 40
