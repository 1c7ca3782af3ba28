"""The command `moe`: its helps, the smallest use of each sub-command, errors, completion."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import BUILD, run_python

import moe_mlir_command
from moe_mlir._support import command_line
from moe_mlir_command import COMMANDS, GROUPS

ROOT = Path(__file__).resolve().parents[3]
ROUTER = ROOT / "examples" / "deploy" / "router.mlir"
TOOLS = sorted(name for name, command in COMMANDS.items() if command.tool)
MODULES = sorted(name for name, command in COMMANDS.items() if command.module)
KERNEL = """
import sys, torch, triton, triton.language as tl

@triton.autotune([triton.Config(dict(B=64)), triton.Config(dict(B=128))], key=["n"])
@triton.jit
def count(x, total, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(total, tl.load(total) + tl.sum(tl.load(x + i, mask=i < n, other=0)))

x, total = torch.ones(int(sys.argv[1]), device="cuda"), torch.zeros(1).cuda()
count[lambda meta: (triton.cdiv(x.numel(), meta["B"]),)](x, total, x.numel())
torch.cuda.synchronize()
print(total.item())
"""


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_MLIR_CACHE", "1")
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path / "cache"))


def moe(*arguments, **options):
    """In a process of its own: tools take its place."""
    return run_python(BUILD / "bin" / "moe", *arguments, timeout=300, **options)


def run(capsys, *arguments):
    """Here, where torch is loaded; (status, what was printed)."""
    try:
        status = moe_mlir_command.main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr()


# -------------------------------------------------------------------------- helps


def test_the_overview_lists_every_command_without_torch():
    code = ("import sys, moe_mlir_command; moe_mlir_command.main(['--help']); "
            "print('torch' in sys.modules)")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert all(re.search(rf"^  {name} +\S", shown, re.MULTILINE) for name in COMMANDS)
    assert "\033" not in shown and shown.endswith("False\n")


@pytest.mark.parametrize("name", MODULES)
def test_helps_have_examples(name, capsys):
    status, printed = run(capsys, name, "--help")
    assert status == 0 and printed.err == "" and "\033" not in printed.out
    assert printed.out.startswith(f"usage: moe {name}")
    assert re.search(rf"^examples:\n( +.*\n)* +.*moe {name}", printed.out, re.MULTILINE)
    longest = max(printed.out.split("examples:")[0].splitlines(), key=len)
    assert len(longest) <= 110, longest


@pytest.mark.parametrize("name", TOOLS)
def test_helps_of_tools_begin_with_an_example(name):
    done = moe(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"moe {name}" in done.stdout[:400] and COMMANDS[name].example in done.stdout


def test_the_help_of_opt_lists_our_passes_alone():
    shown = moe("help", "opt").stdout
    assert "--moe-to-cpu" in shown and "--convert-moe-to-gpu" in shown
    assert shown.count("\n") < 120 and "--canonicalize" not in shown


def test_the_page_of_commands_says_what_the_helps_say():
    page = (ROOT / "docs" / "Commands.md").read_text()
    rows = re.findall(r"^\| `moe (\S+)` \| (.*) \| `(.*)` \|$", page, re.MULTILINE)
    assert rows == [(c.name, c.summary, c.example) for group in GROUPS.values() for c in group]
    assert all(f"\n## {title}\n" in page for title in GROUPS)


# -------------------------------------------------------------------- smallest use


def test_explain_reads_a_function_and_a_program(capsys, tmp_path):
    model = tmp_path / "model.py"
    model.write_text("import torch\nclass Router(torch.nn.Module):\n  def forward(self, x):\n"
                     "    return x.softmax(-1).topk(2)\n"
                     "def make():\n  return Router(), (torch.randn(4, 8),)\n")
    status, printed = run(capsys, "explain", f"{model}:make", "--json")
    (found,) = json.loads(printed.out)
    assert status == 0 and found["k"] == 2 and found["num_experts"] == 8 and found["recognised"]
    status, printed = run(capsys, "explain", f"{model}:other")
    assert status == 2 and "expected a function 'other'" in printed.err
    status, printed = run(capsys, "explain", tmp_path / "none.pt2")
    assert status == 2 and "found no file" in printed.err


def test_explain_reads_a_checkpoint_without_its_weights(capsys, tmp_path):
    pytest.importorskip("transformers")
    from moe_mlir_bench.models import FAMILIES

    FAMILIES["Mixtral"].configure().save_pretrained(tmp_path)
    status, printed = run(capsys, "explain", tmp_path)
    assert status == 0 and printed.out.endswith("1 of 1 recognised\n")


def test_explain_says_once_what_is_true_of_many_routers(capsys, tmp_path):
    (tmp_path / "model.py").write_text("""
import torch
class Layer(torch.nn.Module):
    def __init__(self, k):
        super().__init__()
        self.gate, self.k = torch.nn.Linear(8, 8), k
    def forward(self, x):
        return self.gate(x).softmax(-1).topk(self.k)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(map(Layer, (2, 2, 3, 2)))
    def forward(self, x):
        return [layer(x) for layer in self.layers]
def make():
    return Model(), (torch.randn(4, 8),)
""")
    status, printed = run(capsys, "explain", f"{tmp_path}/model.py:make")
    lines = [line for line in printed.out.splitlines() if not line.startswith(" ")]
    assert status == 0 and len(lines) == 3
    assert lines[0].startswith("3 routers, ") and "the 2 largest of a softmax" in lines[0]
    assert "the 3 largest of a softmax" in lines[1] and lines[2] == "4 of 4 recognised"


def test_compile_run_and_phases(tmp_path, capsys):
    artifact, dumps = tmp_path / "router.artifact", tmp_path / "dumps"
    done = moe("compile", ROUTER, "-o", artifact, f"--dump-phases-to={dumps}")
    assert done.returncode == 0, done.stderr
    assert "route" in moe("run", artifact, "--list").stdout
    status, printed = run(capsys, "phases", dumps, "-o", tmp_path / "page.html")
    assert status == 0 and (tmp_path / "page.html").stat().st_size > 1000
    assert "topk_renorm" in moe("opt", ROUTER).stdout
    assert moe("run", tmp_path / "none").returncode != 0


def test_reproduce_compiles_again(tmp_path, capsys):
    from moe_mlir.compiler import crash_report

    file = crash_report.write(tmp_path, "ptx", ROUTER.read_text(), "sm_90", "")
    status, printed = run(capsys, "reproduce", file)
    assert status == 0 and printed.out.startswith("compiled: ptx of"), printed.err


def test_sim_runs_a_kernel():
    ptx = ROOT / "tests" / "Simulator" / "saxpy.ptx"
    assert "saxpy" in moe("sim", ptx, "--list").stdout


@pytest.mark.parametrize("name, arguments, shows", [
    ("models", ["--list"], "Mixtral"), ("bench", ["--list"], "topk_renorm"),
    ("gpu-check", ["run", "--plan"], "group"), ("tune", ["--list"], "pipeline"),
    ("doctor", [], "moe-mlir"), ("cache", [], "entries")])
def test_the_rest_prints_a_table(name, arguments, shows, capsys):
    _, printed = run(capsys, name, *arguments)
    assert shows in printed.out


@pytest.mark.parametrize("name, arguments, key", [
    ("models", ["--list"], "Mixtral"), ("tune", ["--list"], "pipeline"), ("doctor", [], "facts"),
    ("cache", [], "entries"), ("cache", ["clear"], "removed")])
def test_json(name, arguments, key, capsys):
    _, printed = run(capsys, name, *arguments, "--json")
    assert key in json.loads(printed.out)


def test_check_finds_the_race_of_a_program(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "count.py").write_text(KERNEL)
    done = moe("check", "--json", tmp_path / "count.py", "200")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["kernels"] == ["count"] and report["launches"] == 1 and report["ended"]
    # Which sum a block reads, and so whether two store the same, is what they race for.
    kinds = {one["kind"] for one in report["findings"]}
    assert "race" in kinds and kinds <= {"race", "equal-stores"}
    assert report["findings"][0]["source"].endswith("count.py:9")
    done = moe("check", tmp_path / "count.py", "60")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "60.0\nlaunches: 1, kernels: 1, findings: 0\n"
    done = moe("check", tmp_path / "count.py")
    assert done.returncode == 2 and "IndexError" in done.stderr


def test_check_runs_what_is_benchmarked_once(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "timed.py").write_text(KERNEL.replace(
        "torch.cuda.synchronize()",
        "print(triton.testing.do_bench(lambda: count[(1,)](x, total, 60), quantiles=[0.5, 0.9]))"))
    done = moe("check", tmp_path / "timed.py", "60")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[nan, nan]\n120.0\nlaunches: 2, kernels: 1, findings: 0\n"


def test_check_says_when_nothing_was_launched(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "none.py").write_text("print('no kernel')\n")
    done = moe("check", tmp_path / "none.py")
    assert done.returncode == 0 and "no launch: nothing was checked" in done.stderr


# ------------------------------------------------------------------ errors, colours


@pytest.mark.parametrize("arguments, says", [
    (["expain"], "did you mean `moe explain`?"),
    (["tune", "--lst"], "did you mean --list?"),
    (["tune", "--json"], "expected --json with --list"),
    (["cache", "lss"], "invalid choice"),
    (["check", "none.py"], "found no file none.py"),
    (["check", "--chp", "none.py"], "did you mean --chip?"),
    (["check"], "are required: FILE.py\n"),
    (["check", "--chip", "sm_91", __file__], "expected a chip among sm_60"),
    (["explain", __file__], "test_command.py:make; found"),
    (["explain", "--op", "topk"], "did you mean topk_renorm?"),
    (["explain", "none"], "expected a .pt2 file")])
def test_wrong_arguments_are_one_line(arguments, says, capsys):
    status, printed = run(capsys, *arguments)
    assert status == 2 and printed.out == ""
    assert says in printed.err and printed.err.count("\n") == 1


def test_a_reader_that_stops_gets_no_traceback():
    done = subprocess.run(f"'{BUILD}/bin/moe' bench --list | head -1", shell=True,
                          capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_headings_are_bold_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    parser = command_line.Parser("doctor", "Reports.", examples=("moe doctor",))
    for stream, bold in ((Terminal(), True), (io.StringIO(), False)):
        parser.print_help(stream)
        assert ("\033[1mexamples:\033[0m" in stream.getvalue()) == bold
        assert moe_mlir_command.is_coloured(stream) == bold
    assert "\033[1mModels:\033[0m" in moe_mlir_command.overview(coloured=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not moe_mlir_command.is_coloured(Terminal())


# ---------------------------------------------------------------------- completion


def test_bash_completes_commands_and_options(capsys):
    pytest.importorskip("shtab")
    status, printed = run(capsys, "completion", "bash")
    assert status == 0
    ask = """
complete_line() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_moe; echo ${COMPREPLY[@]}; }
complete_line moe expl
complete_line moe tune --dr
complete_line moe sim --poli
complete_line moe opt --moe-to-c
"""
    done = subprocess.run(["bash", "-c", printed.out + ask], capture_output=True, text=True)
    assert done.stdout.split() == ["explain", "--dry-run", "--policy", "--moe-to-cpu"], done.stderr
