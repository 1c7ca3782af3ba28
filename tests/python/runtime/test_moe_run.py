"""moe-run and libmoe_runtime's loader: artifacts without LLVM, torch or a linker."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from support import PACKAGE, rewrite_manifest, run_tool, save_router

import moe_mlir
from moe_mlir import nn

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/deploy"


def compile_to(folder, source, *options):
    done = run_tool("moe-compile", source, "-o", folder, "--target=cpu", *options)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    return compile_to(tmp_path_factory.mktemp("artifacts") / "router", EXAMPLES / "router.mlir")


def run_router(router, folder, h, weight):
    np.save(folder / "h.npy", h)
    np.save(folder / "w.npy", weight)
    return run_tool("moe-run", router, "--input", "h.npy", "--input=w.npy", "--output", "gates.npy",
                "--output", "indices.npy", cwd=folder)


@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
def test_router_equals_reference(router, tmp_path, tokens):
    generator = np.random.default_rng(tokens)
    h = generator.standard_normal((tokens, 64)).astype(np.float32)
    weight = generator.standard_normal((16, 64)).astype(np.float32)
    done = run_router(router, tmp_path, h, weight)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    z = h.astype(np.float64) @ weight.astype(np.float64).T
    best = np.argsort(-z, axis=1, kind="stable")[:, :2]
    gates = torch.softmax(torch.from_numpy(np.take_along_axis(z, best, 1)), 1).numpy()
    assert np.array_equal(np.load(tmp_path / "indices.npy"), best)
    np.testing.assert_allclose(np.load(tmp_path / "gates.npy"), gates, atol=4e-6)


def test_bf16_and_masks_pass_through_npy(tmp_path):
    (tmp_path / "m.mlir").write_text("""
      func.func @select(%z: tensor<?x8xbf16>, %mask: tensor<?xi1>)
          -> (tensor<?x3xf32>, tensor<?x3xi64>) {
        %c0 = arith.constant 0 : index
        %n = tensor.dim %z, %c0 : tensor<?x8xbf16>
        %g = tensor.empty(%n) : tensor<?x3xf32>
        %i = tensor.empty(%n) : tensor<?x3xi64>
        %r:2 = moe.topk_renorm ins(%z : tensor<?x8xbf16>) mask(%mask : tensor<?xi1>)
            outs(%g, %i : tensor<?x3xf32>, tensor<?x3xi64>)
            {kind = #moe.score_kind<logits>} -> tensor<?x3xf32>, tensor<?x3xi64>
        return %r#0, %r#1 : tensor<?x3xf32>, tensor<?x3xi64>
      }""")
    artifact = compile_to(tmp_path / "a", tmp_path / "m.mlir")
    torch.manual_seed(0)
    z, mask = torch.randn(5, 8).bfloat16(), torch.tensor([True, False, True, True, False])
    np.save(tmp_path / "z.npy", z.view(torch.int16).numpy().view("V2"))
    np.save(tmp_path / "mask.npy", mask.numpy())
    done = run_tool("moe-run", artifact, "--input", "z.npy", "--input", "mask.npy", "--output",
                "g.npy", "--output", "i.npy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gates, indices = moe_mlir.reference.topk_renorm(z, 3, mask=mask)
    assert np.array_equal(np.load(tmp_path / "i.npy"), indices.numpy())
    np.testing.assert_allclose(np.load(tmp_path / "g.npy"), gates.float().numpy(), atol=2e-6)


def test_torch_program_brings_its_weights(tmp_path):
    torch.manual_seed(0)
    router = nn.SMoE(24, 6, 2).eval()
    save_router(router, tmp_path / "router.pt2")
    artifact = compile_to(tmp_path / "a", tmp_path / "router.pt2")
    h = torch.randn(33, 24)
    np.save(tmp_path / "h.npy", h.numpy())
    listed = run_tool("moe-run", artifact, "--list")
    assert "argument 0 h: f32[?, 24]" in listed.stdout, listed
    done = run_tool("moe-run", artifact, "--input", "h.npy", "--output", "g.npy", "--output", "i.npy",
                cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = router(h)
    assert np.array_equal(np.load(tmp_path / "i.npy"), expected.indices.numpy())
    np.testing.assert_allclose(np.load(tmp_path / "g.npy"), expected.gates.detach().numpy(),
                               atol=2e-6)


class Sum(torch.nn.Module):
    def forward(self, x, y):
        return x + y


SIZES = {
    "too few": ((2, 2), "expected dim 0 >= 3, as the program was exported, found 2; export it with"),
    "too many": ((10, 10), "expected dim 0 <= 9, as the program was exported, found 10"),
    "not equal": ((4, 5), r"expected dim 0 to be 4, .*, found 5"),
    "both ends": ((3, 3), None), "many": ((9, 9), None),
}


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """x + y of 3 to 9 rows: the program and its artifact."""
    folder = tmp_path_factory.mktemp("bounded")
    rows = torch.export.Dim("rows", min=3, max=9)
    program = torch.export.export(Sum(), (torch.ones(4, 8), torch.ones(4, 8)),
                                  dynamic_shapes=({0: rows}, {0: rows}))
    torch.export.save(program, folder / "sum.pt2")
    artifact = compile_to(folder / "new", folder / "sum.pt2")
    return program, artifact


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_that_a_program_was_not_exported_for(bounded, sizes, tmp_path):
    program, artifact = bounded
    rows, message = SIZES[sizes]
    x, y = (torch.randn(n, 8) for n in rows)
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "y.npy", y.numpy())
    done = run_tool("moe-run", artifact, "--input=x.npy", "--input=y.npy", "--output=z.npy",
                    cwd=tmp_path)
    calls = moe_mlir.load(artifact), moe_mlir.compile(program)
    if message is None:
        assert done.returncode == 0, done.stderr
        for found in (torch.from_numpy(np.load(tmp_path / "z.npy")), *(call(x, y) for call in calls)):
            assert torch.equal(found, x + y)
        return
    name = "x" if "not" not in sizes else "y"
    assert done.returncode == 1 and not (tmp_path / "z.npy").exists()
    assert re.search(rf"argument . \('{name}'\) of 'main': {message}", done.stderr), done.stderr
    with pytest.raises(ValueError, match=rf"input '{name}': {message}"):
        calls[0](x, y)
    with pytest.raises(ValueError, match="expected" if "not" in sizes else message):
        calls[1](x, y)


def test_repeat_prints_times_and_threads_do_not_change_results(router, tmp_path):
    generator = np.random.default_rng(0)
    np.save(tmp_path / "h.npy", generator.standard_normal((5000, 64)).astype(np.float32))
    np.save(tmp_path / "w.npy", generator.standard_normal((16, 64)).astype(np.float32))
    for threads in (1, 2):
        done = run_tool("moe-run", router, "--input", "h.npy", "--input", "w.npy", "--output",
                    f"g{threads}.npy", "--threads", threads, "--repeat", 3, cwd=tmp_path)
        assert "3 runs, shortest" in done.stdout, done
    assert np.array_equal(np.load(tmp_path / "g1.npy"), np.load(tmp_path / "g2.npy"))


def test_cpp_example(router, tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    built = subprocess.run(
        [compiler, "-std=c++20", EXAMPLES / "route.cpp", "-I", ROOT / "include", "-L",
         PACKAGE, f"-Wl,-rpath,{PACKAGE}", "-lmoe_runtime", "-o", tmp_path / "route"],
        capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([tmp_path / "route", router], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "token 3: expert 3 with gate 0.953, expert 0 with 0.047" in done.stdout
    assert len((EXAMPLES / "route.cpp").read_text().splitlines()) <= 55


def damage(folder, name, change):
    data = bytearray((folder / name).read_bytes())
    change(data)
    (folder / name).write_bytes(bytes(data))


BAD_ARTIFACTS = {
    "flipped bit": (lambda f: damage(f, "kernel.o", lambda d: d.__setitem__(99, d[99] ^ 1)),
                    "to have SHA-256"),
    "truncated": (lambda f: damage(f, "kernel.o", lambda d: d.__delitem__(slice(500, None))),
                  "the artifact is damaged, compile it again"),
    "missing file": (lambda f: (f / "kernel.o").unlink(), "found no such file"),
    "not json": (lambda f: (f / "manifest.json").write_text("{\n  no"),
                 "manifest.json:2: error: expected a string"),
    "other json": (lambda f: (f / "manifest.json").write_text("{}"), "found another file"),
    "deep json": (lambda f: (f / "manifest.json").write_text("[" * 100000),
                  "64 levels of nesting"),
    "name twice": (lambda f: (f / "manifest.json").write_text('{"format": 1, "format": 1}'),
                   "expected each name once in an object, found 'format' again"),
    "infinity": (lambda f: (f / "manifest.json").write_text('{"format": inf}'),
                 "manifest.json:1: error: expected a value"),
    "latin-1": (lambda f: (f / "manifest.json").write_bytes(b'{"\xe9": 1}'), "expected UTF-8"),
    "lone surrogate": (lambda f: (f / "manifest.json").write_text('{"\\ud800": 1}'),
                       "expected surrogates in pairs"),
    "changed size": (lambda f: damage(
        f, "manifest.json", lambda d: d.__setitem__(d.index(b"64"), ord("3"))),
        "manifest.json to have SHA-256"),
    "no digest": (lambda f: (f / "manifest.json.sha256").unlink(), "found no such file"),
    "version": (lambda f: rewrite_manifest(f, lambda m: m.update(format_version=99)),
                "expected artifact format 2"),
    "older version": (lambda f: rewrite_manifest(f, lambda m: m.update(format_version=1)),
                      "found 1; compile again with this version"),
    "escape": (lambda f: rewrite_manifest(f, lambda m: m["files"].update({"../x": {}})),
               "expected plain file names"),
    "other cpu": (lambda f: rewrite_manifest(
        f, lambda m: m["target"].update(features="+avx512bf16,+avx512vp2intersect,+avxvnni")),
        None),
}


@pytest.mark.parametrize("case", BAD_ARTIFACTS)
def test_bad_artifact(router, tmp_path, case):
    change, message = BAD_ARTIFACTS[case]
    folder = shutil.copytree(router, tmp_path / "copy")
    change(folder)
    done = run_tool("moe-run", folder, "--list")
    if message is None:  # which CPU is missing what depends on the CPU
        assert done.returncode == 0 or "to be compiled for this CPU" in done.stderr
        return
    assert done.returncode == 1 and message in done.stderr, done


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifacts") / "kernels"
    done = run_tool("moe-compile", EXAMPLES / "router.mlir", "-o", folder, "--target=sm_80")
    assert done.returncode == 0, done.stderr
    return folder


def of_function(**entries):
    return lambda manifest: manifest["functions"][0].update(entries)


def of_result(change):
    return lambda manifest: change(manifest["functions"][0]["results"][0])


def of_kernel(**entries):
    return lambda manifest: manifest["functions"][0]["kernels"][0].update(entries)


WRONG_SIZES = {
    "rank": ([4], "expected a size for each dimension"),
    "no size": ([["arg", 0, 0], "two"], "expected a list in the manifest"),
    "operation": ([["arg", 0, 0], ["**", 2, 3]], "one of + * // % ceildiv"),
    "argument": ([["arg", 0, 0], ["arg", -1, 0]], "to name one of 4 arguments and results"),
    "dimension": ([["arg", 0, 0], ["arg", 0, 7]], "expected a dimension of f32[?, 64]"),
    "scalar": ([["arg", 0, 0], ["arg", 0]], "expected a size to depend on an integer"),
    "overflow": ([["*", 2**62, ["arg", 0, 0]], 2], "stays within 64 bits"),
    "negative": ([["+", -9, ["arg", 0, 0]], 2], "expected sizes whose product is a size"),
    "large": ([["*", 2**60, ["arg", 0, 0]], 2], "expected a tensor that fits into memory"),
    "no memory": ([["*", 2**50, ["arg", 0, 0]], 2], "bytes of memory for f32"),
}

# Of manifests whose digest is right: what a compiler with a defect would write.
WRONG_MANIFESTS = {
    **{f"size: {name}": ("kernels", of_result(lambda r, s=sizes: r.update(sizes=s)), message)
       for name, (sizes, message) in WRONG_SIZES.items()},
    "shape": ("router", of_result(lambda r: r.update(shape=[-1, 3], sizes=[["arg", 0, 0], 3])),
              "to take and give what the manifest says"),
    "types": ("router", of_function(arguments=[]), "to take and give what the manifest says"),
    "function": ("router", of_function(name="f"), "expected a description of 'f'"),
    "result of another rank": ("kernels", of_result(lambda r: r.update(shape=[-1])),
                               "expected a size for each dimension"),
    "rank": ("kernels", of_result(lambda r: r.update(shape=[1] * 99)), "in at most 32 dimensions"),
    "dtype": ("kernels", of_result(lambda r: r.update(dtype="f31")), "found 'f31'"),
    "twice": ("kernels", lambda m: m["functions"].append(m["functions"][0]),
              "expected each function once"),
    "grid": ("kernels", of_kernel(grid=[1] * 9), "expected a grid of one to three sizes, found 9"),
    "no grid": ("kernels", of_kernel(grid=[]), "expected a grid of one to three sizes, found 0"),
    "large grid": ("kernels", of_kernel(grid=[2**40]), "2147483647 blocks along x of kernel 'route_kernel', found 1099511627776"),
    "block": ("kernels", of_kernel(block_size=2**32), "expected block_size of a kernel in [1, 1024]"),
    "shared memory": ("kernels", of_kernel(dynamic_smem=-1), "expected dynamic_smem of a kernel"),
    "workspace": ("kernels", of_function(workspace=["arg", 9]), "to name one of 4 arguments"),
    "fewer arguments": ("kernels", of_function(workspace=8), "parameters for kernel"),
    "file name": ("router", lambda m: m["files"].update({"kernel.o\0x": {"sha256": ""}}),
                  "expected plain file names"),
}


@pytest.mark.parametrize("case", WRONG_MANIFESTS)
def test_wrong_manifest(case, request, tmp_path):
    kind, change, message = WRONG_MANIFESTS[case]
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "copy")
    rewrite_manifest(folder, change)
    np.save(tmp_path / "h.npy", np.zeros((3, 64), np.float32))
    np.save(tmp_path / "w.npy", np.zeros((16, 64), np.float32))
    done = run_tool("moe-run", folder, f"--device={'cpu' if kind == 'router' else 'sim'}",
                    "--input=h.npy", "--input=w.npy", cwd=tmp_path)
    assert done.returncode == 1 and message in done.stderr, done
    assert done.stderr.startswith("moe-run: error: ")


def test_digest_is_what_sha256sum_checks(router):
    done = subprocess.run(["sha256sum", "--check", "manifest.json.sha256"], cwd=router)
    assert done.returncode == 0


def test_damaged_object_is_refused_not_run(router, tmp_path):
    """Every truncation and many byte flips of the object's headers, with a matching digest."""

    original = (router / "kernel.o").read_bytes()
    folder = shutil.copytree(router, tmp_path / "copy")
    generator = np.random.default_rng(0)
    for trial in range(60):
        data = bytearray(original)
        if trial % 2:
            del data[generator.integers(len(data)):]
        else:  # the section headers lie at the end of the file
            data[-int(generator.integers(1, 640))] ^= 1 << int(generator.integers(8))
        (folder / "kernel.o").write_bytes(bytes(data))
        digest = hashlib.sha256(bytes(data)).hexdigest()
        rewrite_manifest(folder, lambda m, d=digest: m["files"]["kernel.o"].update(sha256=d))
        done = run_tool("moe-run", folder, "--list")
        assert done.returncode in (0, 1), (trial, done)


BAD_CALLS = {
    "too few": (["--input", "h.npy"], "expected 2 arguments for 'route', found 1"),
    "swapped": (["--input", "w.npy", "--input", "h.npy"], "expected argument 1 of 'route'"),
    "f64": (["--input", "f64.npy", "--input", "w.npy"], "to be f32[?, 64], found f64[3, 64]"),
    "no file": (["--input", "nope.npy"], "nope.npy: cannot be opened"),
    "not npy": (["--input", "text.npy"], "text.npy: expected a .npy file"),
    "short npy": (["--input", "short.npy"], "short.npy: ends within its header"),
    "npy shape": (["--input", "shape.npy"], "expected a shape such as (3, 4)"),
    "cut npy": (["--input", "cut.npy", "--input", "w.npy"], "bytes after the header, found"),
    "outputs": (["--output=a", "--output=b", "--output=c"], "expected at most 2 --output"),
    "function": (["--function", "f"], "expected the name of a function among route, found 'f'"),
    "unknown": (["--inputs", "x"], "unknown option --inputs; see moe-run --help"),
    "no value": (["--input"], "expected a value after --input"),
    "count": (["--repeat", "0"], "expected a number in [1, 1000000] after --repeat"),
    "device": (["--device", "tpu"], "found 'tpu'"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call(router, tmp_path, case):
    options, message = BAD_CALLS[case]
    np.save(tmp_path / "h.npy", np.zeros((3, 64), np.float32))
    np.save(tmp_path / "w.npy", np.zeros((16, 64), np.float32))
    np.save(tmp_path / "f64.npy", np.zeros((3, 64)))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "h.npy").read_bytes()[:300])
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY\x02\x00\x00\x00")
    (tmp_path / "shape.npy").write_bytes(
        (tmp_path / "h.npy").read_bytes().replace(b"(3, 64)", b"(3, -4)"))
    done = run_tool("moe-run", router, *options, cwd=tmp_path)
    assert done.returncode == 1 and message in done.stderr, done
    assert done.stderr.startswith("moe-run: error: ") and not done.stdout


def test_help_names_every_option():
    done = run_tool("moe-run", "--help")
    assert done.returncode == 0
    for option in ("--list", "--function", "--input", "--output", "--device", "--verify",
                   "--threads", "--repeat"):
        assert option in done.stdout
