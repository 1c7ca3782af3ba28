""".vscode: what its files name exists, and the servers answer; the recipe for Compiler Explorer."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import moe_mlir
from moe_mlir._support.paths import PACKAGE

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(moe_mlir.__file__).absolute().parents[2]
FOLDER = ROOT / ".vscode"
FILES = {path.name: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
SETTINGS = FILES["settings.json"]
PAGE = (ROOT / "docs" / "Contributing.md").read_text()


def in_tree(name):
    """A path of the settings, in the build that is tested."""
    name = name.replace("${workspaceFolder}/", "")
    return BUILD / name.removeprefix("build/") if name.startswith("build/") else ROOT / name


def test_every_file_that_the_settings_name_exists():
    servers = [SETTINGS["mlir.server_path"], SETTINGS["mlir.tablegen_server_path"],
               *SETTINGS["mlir.tablegen_compilation_databases"], SETTINGS["python.envFile"],
               *SETTINGS["python.analysis.extraPaths"], *SETTINGS["python.testing.pytestArgs"]]
    servers += [c["program"] for c in FILES["launch.json"]["configurations"]
                if "workspaceFolder" in c["program"]]
    (commands,) = [a for a in SETTINGS["clangd.arguments"] if a.startswith("--compile-commands-dir=")]
    servers.append(commands.partition("=")[2] + "/compile_commands.json")
    assert [name for name in servers if not in_tree(name).exists()] == []


def test_tasks_run_what_the_tree_has():
    tasks = FILES["tasks.json"]["tasks"]
    assert {"build", "test: quick", "test: all"} <= {task["label"] for task in tasks}
    for task in tasks:
        program = shlex.split(task["command"])[0]
        if program.startswith("./"):
            assert os.access(ROOT / program, os.X_OK), program
        else:
            assert program in ("ninja", "python", "lit"), program
    for label in ("build", "test: quick"):
        assert f"`{label}`" in PAGE


def test_formatters_and_recommendations_agree():
    wanted = FILES["extensions.json"]["recommendations"]
    assert SETTINGS["[cpp]"]["editor.defaultFormatter"] in wanted
    assert not set(wanted) & set(FILES["extensions.json"]["unwantedRecommendations"])


def messages(*payloads):
    for payload in payloads:
        body = json.dumps({"jsonrpc": "2.0", **payload})
        yield f"Content-Length: {len(body)}\r\n\r\n{body}"


def ask(command, uri, language, text, *requests):
    """What a language server says of a file."""
    opened = {"textDocument": {"uri": uri, "languageId": language, "version": 1, "text": text}}
    sent = messages(
        {"id": 0, "method": "initialize",
         "params": {"processId": None, "rootUri": None, "capabilities": {}}},
        {"method": "textDocument/didOpen", "params": opened}, *requests,
        {"id": 99, "method": "shutdown", "params": None}, {"method": "exit"})
    done = subprocess.run(command, input="".join(sent), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_server_of_ir_knows_our_ops():
    said = ask([in_tree(SETTINGS["mlir.server_path"])], "test:///f.mlir", "mlir",
               "func.func @f(%z: tensor<4x8xf32>) {\n  moe.assert %z\n  return\n}\n")
    assert '"diagnostics":[{' in said.replace(" ", "")
    assert "unregistered" not in said and "does not exist" not in said


def test_the_server_of_tablegen_finds_what_definitions_include():
    server = in_tree(SETTINGS["mlir.tablegen_server_path"])
    (database,) = SETTINGS["mlir.tablegen_compilation_databases"]
    path = ROOT / "include" / "MoE" / "Dialect" / "MoE" / "IR" / "MoEOps.td"
    position = {"textDocument": {"uri": path.as_uri()}, "position": {"line": 0, "character": 0}}
    said = ask([server, f"--tablegen-compilation-database={in_tree(database)}"], path.as_uri(),
               "tablegen", path.read_text(),
               {"id": 1, "method": "textDocument/documentLink", "params": position})
    assert '"severity":1' not in said.replace(" ", ""), said
    assert "MoESelectionOps.td" in said


# ----------------------------------------------------------------- Compiler Explorer


def properties():
    body = re.search(r"^```properties\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
    return dict(line.split("=", 1) for line in body.splitlines() if line)


def compilers():
    return properties()["group.moe.compilers"].split(":")


def test_the_recipe_names_each_compiler():
    found = properties()
    assert found["defaultCompiler"] in compilers() and found["compilers"] == "&moe"
    for name in compilers():
        exe = found[f"compiler.{name}.exe"]
        assert in_tree(exe.removeprefix("/path/to/moe-mlir/")).exists()
        assert found[f"compiler.{name}.name"]
    assert PACKAGE.name in PAGE[PAGE.index("installed wheel has the same"):]


@pytest.mark.parametrize("name", compilers())
def test_it_runs_them_as_compiler_explorer_does(name, tmp_path):
    """lib/compilers/mlir.ts: `-o`, an output, the options, and the source."""
    found = properties()
    exe = in_tree(found[f"compiler.{name}.exe"].removeprefix("/path/to/moe-mlir/"))
    out = tmp_path / "example.out.mlir"
    options = found.get(f"compiler.{name}.options", "--moe-to-cpu").split()
    done = subprocess.run([exe, "-o", out, *options, ROOT / "examples" / "deploy" / "router.mlir"],
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = {"moecpu": "llvm.func", "moegpu": "scf.forall", "moeasm": ".globl", "moeptx": ".target sm_90a"}
    assert wanted[name] in out.read_text()
    shown = subprocess.run([exe, "--version"], capture_output=True, text=True)
    assert shown.returncode == 0 and re.search(r"\d+\.\d+\.\d+", shown.stdout)
