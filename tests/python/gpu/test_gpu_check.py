"""The checks of a GPU's machine, in the simulator and without the compiler."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import seeds
import torch

import moe_mlir
from moe_mlir import reference, sim
from moe_mlir.gpu import cuda
from moe_mlir.sim.simulation import active_simulation
from moe_mlir_bench.gpu_check import __main__ as gpu_check
from moe_mlir_bench.gpu_check import (
    capture,
    cases,
    catalogue,
    gradients,
    instructions,
    machine,
    pack,
    rows,
    supervise,
    vectors,
    wgmma,
)
from moe_mlir_bench.gpu_check.case import Problem
from moe_mlir_bench.gpu_check.target import Target

SIMULATOR = Target("sim")


def kind(unit):
    """Of the cases of one kind a plain run has one."""
    words = unit.name.replace("gradient of ", "gradient-").removeprefix("time of ").split()
    return unit.group, words[0], words[-1] in ("sm_80", "unaligned")


# Ops in their smallest form are what test_every_op.py and test_backward_ops.py run.
ELSEWHERE = {*cases.OPS, *(f"gradient of {name}" for name in gradients.CASES)}
CASES = [case for case in cases.all_cases(rehearses=True) if case.name not in ELSEWHERE]


@pytest.mark.parametrize("case", seeds.some(CASES, by=kind), ids=lambda case: case.name)
def test_case(case):
    assert case.run(SIMULATOR) == {}


@pytest.mark.parametrize("row", seeds.some(rows.all_rows(rehearses=True), by=kind),
                         ids=lambda row: row.name)
def test_row_of_times_is_rehearsed(row):
    """Ours and each peer that a CPU runs, at a fraction of the size, against eager."""
    missing = row.run(SIMULATOR).get("peers_without_cpu", {})
    assert set(missing) <= {"triton", "linear_triton", "cudnn"}


def test_instructions():
    for unit in instructions.all_vectors():
        facts = unit.run(SIMULATOR)["simulator"]
        assert facts["differ"] == 0 and facts["of"] >= 64, unit.name


def test_names_are_unique_and_groups_known():
    for rehearses in (False, True):
        units = catalogue.all_units(rehearses)
        assert len({unit.name for unit in units}) == len(units)
        assert {unit.group for unit in units} <= {*catalogue.SHARES, "faults"}
    assert set(machine.SANITIZED) <= {unit.name for unit in units}


def test_eight_minutes():
    """What is modelled fits, group by group, and no group ends after the budget."""
    groups = catalogue.groups(False, catalogue.BUDGET)
    assert groups[-1].deadline == catalogue.BUDGET <= 480
    spent = 0.0
    for group in groups:
        spent += group.model
        assert spent <= group.deadline, group.name


# ---------------------------------------------------------------- what is found


def small_case():
    return cases.selection_case(9, 16, 2, torch.bfloat16)


def test_a_wrong_result_is_found_with_its_tensors():
    case = small_case()
    wrong = dataclasses.replace(
        case, call=lambda *x: tuple(y + 1 for y in case.call(*x)))
    with pytest.raises(Problem, match="result 0: .* of the tolerance") as caught:
        wrong.run(SIMULATOR)
    arrays = caught.value.arrays
    assert arrays["input_0"].shape == (9, 16)
    np.testing.assert_allclose(arrays["found"], arrays["expected"] + 1)


def test_results_that_change_are_found():
    case, turn = small_case(), iter(range(2))
    changing = dataclasses.replace(case, call=lambda z: torch.full((2,), float(next(turn))))
    with pytest.raises(Problem, match="result 0 differs between two runs"):
        changing.run(SIMULATOR)


@pytest.mark.parametrize("change, found", [
    (lambda g, i: (g, i.flip(-1)), "scores rise"), (lambda g, i: (g * 1.01, i), "gates differ"),
    (lambda g, i: (g, i + 64), "expected experts in"),
    (lambda g, i: (g, i[:, :1].expand_as(i)), "chosen twice"),
    (lambda g, i: (g, (i + 1) % 16), "below the k-th best"),
])
def test_wrong_routes_are_found(change, found):
    h, w = torch.randn(20, 32), torch.randn(16, 32)
    gates, indices = reference.topk_renorm(h.double() @ w.double().T, 4)
    assert cases.judge_router([h, w], [gates, indices], 0) == ""
    assert found in cases.judge_router([h, w], change(gates, indices), 0)


@pytest.mark.parametrize("change", [{"n": 24}, {"transposed": (False, False)}])
def test_other_layouts_of_wgmma_give_other_sums(change):
    """The images hold NaN where no element is, and the sums are exact."""
    unit = wgmma.wgmma_case(40, "bf16", (128, 64), (False, True))
    other = wgmma.wgmma_case(**{"n": 40, "form": "bf16", "swizzles": (128, 128),
                                "transposed": (False, True), **change})
    if other.out == unit.out:
        unit = dataclasses.replace(unit, inputs=(unit.inputs[0], other.inputs[1], unit.inputs[2]))
    else:
        unit = dataclasses.replace(unit, expected=unit.expected + 1)
    with pytest.raises(Problem, match="results differ from the exact ones"):
        unit.run(SIMULATOR)


def test_what_hardware_answers_becomes_a_fixture(tmp_path):
    unit = next(u for u in instructions.all_vectors() if u.name == "ex2_approx_ftz_f32")
    arrays = unit.run(SIMULATOR)["vectors"]
    path = tmp_path / "instructions" / "ex2.npz"
    path.parent.mkdir()
    np.savez(path, **arrays)
    assert vectors.replay(path) == ""
    # Two units in the last place are allowed, 2^-20 is not.
    words = arrays["words"].copy()
    values = words.view(np.float32)
    at = int(np.argmax((values > 1) & (values < 1.5)))
    words[at] += 1
    np.savez(path, **{**arrays, "words": words})
    assert vectors.replay(path) == ""
    words[at] += 8
    np.savez(path, **{**arrays, "words": words})
    assert "1 of 4096 results are further" in vectors.replay(path)
    assert gpu_check.main(["fixtures", str(tmp_path), "--to", str(tmp_path / "to")]) == 0
    assert (tmp_path / "to" / "ex2.npz").exists()


def test_sums_of_matrices_have_room_by_their_magnitude():
    unit = next(u for u in instructions.all_vectors() if u.name.startswith("mma_m16n8k16"))
    words = unit.run(SIMULATOR)["vectors"]["words"]
    sums = words.view(np.float32)
    close = (sums * np.float32(1 + 2**-22)).view(np.uint32)
    assert unit.compare(close)[0] == ""
    assert "further from the simulator's" in unit.compare((sums * np.float32(1.001)).view(np.uint32))[0]


def test_a_log_of_compute_sanitizer():
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert machine.read_log(clean) == {"problem": ""}
    found = ("========= Invalid __global__ write of size 4 bytes\n=========     at k+0x90\n"
             "========= ERROR SUMMARY: 128 errors\n")
    assert machine.read_log(found)["problem"] == (
        "128 errors; the first: Invalid __global__ write of size 4 bytes")
    assert "not_run" in machine.read_log("========= COMPUTE-SANITIZER\n")


# ---------------------------------------------------------------- a run


def run(tmp_path, *arguments):
    status = gpu_check.main(["run", "--device=sim", f"--out={tmp_path / 'report'}", *arguments])
    lines = (tmp_path / "report" / "report.jsonl").read_text().splitlines()
    return status, [json.loads(line) for line in lines]


def test_a_fault_costs_its_line_and_nothing_else(tmp_path, capsys):
    status, lines = run(tmp_path, "--groups=faults")
    problems = {line["case"]: line["problem"] for line in lines if "case" in line}
    reasons = {"waits for ever": "nothing changes any more", "runs for ever": "and was killed",
               "writes out of bounds": "in no buffer of the launch",
               "computes wrongly": "128 of 128 results differ from the exact ones",
               "fails to load": "unknown instruction no.such.instruction",
               "kills its process": "its process ended with SIGABRT"}
    for name, reason in reasons.items():
        assert reason in problems.pop(name)
    assert len(problems) == 6 and not any(problems.values())
    assert status == 1 and lines[-1]["summary"] == "6 cases passed, 6 failed"
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said if line.startswith("FAILED")] == [
        f"FAILED {name}" for name in reasons]
    # Of the wrong result there are the words.
    (failure,) = (tmp_path / "report" / "failures").iterdir()
    with np.load(failure) as arrays:
        assert np.array_equal(arrays["words"], arrays["input_0"] + 2)


def test_what_does_not_fit_is_said_to_be_left_out(tmp_path):
    status, lines = run(tmp_path, "--groups=once", "--only=make_finite", "--seconds=0.001")
    (line,) = (line for line in lines if "case" in line)
    assert line["not_run"] == "the time of its group is over" and status == 0
    assert lines[-1]["summary"] == "0 cases passed, 0 failed, 1 not run"


def test_an_interrupted_run_has_its_report(tmp_path, monkeypatch):
    ask, processes = supervise.Worker.run, []

    def interrupt(self, name, limit):
        processes.append(self._process)
        if "n24" in name:
            raise KeyboardInterrupt
        return ask(self, name, limit)

    monkeypatch.setattr(supervise.Worker, "run", interrupt)
    status, lines = run(tmp_path, "--groups=instructions", "--only=wgmma_n")
    assert status == 1 and processes[-1].returncode == -signal.SIGKILL
    assert lines[-2]["problem"] == "interrupted"
    assert lines[-1]["summary"] == "4 cases passed, 1 failed"


def test_processes_that_do_not_come_up(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "_MAX_FAILED_STARTS", 1)
    report = supervise.Report(tmp_path)
    supervisor = supervise.Supervisor(report, ["--device=none"])
    (group,) = catalogue.groups(True, 100, ["instructions"], "wgmma_n8")
    supervisor.run_group(group)
    problems = [line["problem"] for line in report.lines]
    assert "invalid choice: 'none'" in problems[0]
    assert [bool(p) for p in problems] == [True] + [False] * (len(group.units) - 1)
    assert report.lines[-1]["not_run"] == "no process comes up"


def test_unknown_groups():
    with pytest.raises(SystemExit, match="expected groups among once, .* found twice"):
        gpu_check.main(["run", "--groups=once,twice"])


def test_the_plan_is_printed_without_a_gpu(capsys):
    assert gpu_check.main(["run", "--plan"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == str(catalogue.BUDGET)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_says_what_to_do_without_a_gpu():
    with pytest.raises(SystemExit, match="expected a GPU .* --device=sim"):
        gpu_check.main(["run"])


@pytest.mark.long
def test_all_cases(tmp_path):
    status, lines = run(tmp_path)
    assert status == 0 and lines[-1]["summary"].split(",")[1] == " 0 failed"


# ---------------------------------------------------------------- chips


def test_a_newer_gpu_runs_the_kernels_of_an_older_chip():
    assert cuda.chosen_chip((9, 0)) == "sm_90a"
    with cuda.compile_for("sm_80"):
        assert cuda.chosen_chip((9, 0)) == "sm_80"
    with cuda.compile_for("sm_90a"), pytest.raises(cuda.GpuError, match="run on sm_100 .*'sm_90a'"):
        cuda.chosen_chip((10, 0))


@pytest.mark.parametrize("chip, has_wgmma", [("sm_80", False), (None, True)])
def test_the_chip_of_a_run(chip, has_wgmma):
    with Target("sim", chip).active():
        simulation = active_simulation()
        u = torch.randn(1, 70, 64).bfloat16()
        moe_mlir.similarity_inform(u, torch.rand(1, 70, 8).bfloat16(), causal=True)
    names = {name for report in simulation.reports for name in report.counters["instructions"]}
    assert any(name.startswith("wgmma") for name in names) == has_wgmma


# ---------------------------------------------------------------- the pack


def test_packed_kernels_need_no_compiler(tmp_path, monkeypatch):
    """A run in a folder that has neither the native module nor the build tree."""
    case = next(c for c in cases.all_cases() if c.name == "topk_renorm")
    monkeypatch.setattr(cases, "all_cases", lambda rehearses=False: [case])
    monkeypatch.setattr(rows, "all_rows", lambda rehearses=False: [])
    monkeypatch.setattr(capture, "all_captures", lambda: [])
    gpu_check.main(["pack", str(tmp_path / "pack"), "--chips=sm_80"])
    names = {p.name for p in (tmp_path / "pack/moe_mlir").iterdir()}
    assert "libmoe_cuda_runtime.so" in names and not any("_moe." in name for name in names)
    assert not names & {"bench", "demo", "gpu_check", "models"}
    assert (tmp_path / "pack/moe_mlir_bench/gpu_check/worker.py").is_file()
    # What it needs is in the folder: neither package is installed where it runs.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "pack/run.py", "--device=sim", "--groups=once", "--only=topk_renorm"],
        cwd=tmp_path, text=True, capture_output=True, env=environment, timeout=120)
    assert "2 cases passed" not in done.stderr and done.returncode == 0, done.stdout + done.stderr
    assert "1 cases passed, 0 failed; report in gpu-check-report" in done.stdout
    code = """
import torch, moe_mlir
with moe_mlir.simulate(chip="sm_90"):
    moe_mlir.topk_renorm(torch.zeros(3, 9), 2)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "pack", text=True,
                          capture_output=True, timeout=120,
                          env={**environment, "MOE_MLIR_KERNELS": "kernels"})
    assert "expected kernels for this 'topk_renorm' and sm_90 in kernels, found none" in done.stderr


def test_the_pack_has_what_a_gpu_runs_and_what_is_rehearsed():
    texts = pack.kernel_texts()
    for unit in [*cases.all_cases(), *rows.all_rows()]:
        assert unit.module is None or unit.module.text() in texts
    assert len(texts) == len(set(texts)) > 80


def test_refuses_a_folder_with_files(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(SystemExit, match="to be free or empty"):
        gpu_check.main(["pack", str(tmp_path)])


# ---------------------------------------------------------------- the peer


def test_the_triton_router_selects_as_the_op_does():
    """Compiled without a GPU, and run in the simulator."""
    triton = pytest.importorskip("triton")
    from moe_mlir_bench.gpu_check import triton_router

    tokens, experts, k = 37, 100, 4
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        constants = triton_router.constants(experts, k, dtype)
        source = triton.compiler.ASTSource(
            fn=triton_router._kernel, constexprs=constants,
            signature={"scores": name, "gates": "*fp32", "indices": "*i64", "tokens": "i32",
                       **dict.fromkeys(constants, "constexpr")})
        compiled = triton.compile(source, options={"num_warps": 4},
                                  target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
        z = torch.randn(tokens, experts).to(dtype)
        z[3] = z[3].round()  # ties
        gates, indices = torch.zeros(tokens, k), torch.zeros(tokens, k, dtype=torch.int64)
        module = sim.Module(compiled.asm["ptx"])
        ((kernel, described),) = module.kernels.items()
        scratch = [np.zeros(16, np.uint8)] * (len(described["params"]) - 4)
        report = module.launch(kernel, -(-tokens // constants["ROWS"]), 128,
                               [z, gates, indices, tokens, *scratch], allow=("equal-stores",),
                               dynamic_smem=compiled.metadata.shared)
        assert report.ok, str(report)
        expected, chosen = reference.topk_renorm(z.double(), k)
        assert torch.equal(indices, chosen)
        torch.testing.assert_close(gates.double(), expected, rtol=0, atol=2e-6)


def test_the_report_of_an_earlier_run_is_kept(tmp_path):
    for seconds in (1, 2, 3):
        supervise.Report(tmp_path).add(seconds=seconds)
    found = {path.name: json.loads(path.read_text())["seconds"] for path in tmp_path.iterdir()}
    assert found == {"report-1.jsonl": 1, "report-2.jsonl": 2, "report.jsonl": 3}
