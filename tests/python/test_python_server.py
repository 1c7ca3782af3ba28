"""Processes of `run_python`: what an interpreter does, by a fork of one that has torch loaded."""

import os
import subprocess
import sys
import time
from pathlib import Path

import costs
import pytest
import python_client
from support import forked_python, run_python

PYTHON_SERVER = Path(__file__).with_name("python_server.py")
PROGRAMS = {
    "a value": ["-c", "import sys; print(sys.argv); print('said', file=sys.stderr)", "one", "-m"],
    "an exit code": ["-c", "raise SystemExit(7)"],
    "an exit with a text": ["-c", "raise SystemExit('expected more')"],
    "an exit without one": ["-c", "raise SystemExit"],
    "a signal": ["-c", "import os; os.kill(os.getpid(), 11)"],
    "an abort": ["-c", "import os; print('before', flush=True); os.abort()"],
    "an error": ["-c", "import warnings; 1 / 0"],
    "a warning as an error": ["-W", "error", "-c", "import warnings; warnings.warn('mine')"],
    "the main module": ["-c", "import sys; x = 5; print(sys.modules['__main__'].x, __name__)"],
    "a module": ["-m", "json.tool", "--help"],
    "a thread that ends late": ["-c", "import threading, time; threading.Thread("
                                "target=lambda: (time.sleep(0.2), print('late'))).start()"],
    "a handler of the end": ["-c", "import atexit; atexit.register(print, 'the end')"],
    "the path": ["-c", "import sys; print(sys.path)"],
    "the path of a module": ["-m", "paths"],
    "a script": ["paths.py", "--option"],
    "a safe path": ["-P", "-m", "json.tool", "--help"],
    "a folder": ["program"],
    "no such file": ["none.py"],
    "an unknown option": ["-I", "-c", "import sys; print(sys.flags.isolated)"],
    "a process of its own": ["-c", "import subprocess, sys; print(subprocess.run("
                             "[sys.executable, '-c', 'print(3)'], capture_output=True).stdout)"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "paths.py").write_text("import sys; print(sys.path, sys.argv, __file__, __name__)")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text("import sys; print(sys.path, sys.argv, __name__)")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_does_what_an_interpreter_does(folder, name):
    fork, fresh = (run_python(*PROGRAMS[name], fresh=fresh) for fresh in (False, True))
    assert (fork.returncode, fork.stdout) == (fresh.returncode, fresh.stdout)
    assert fork.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]
    # Nothing of the server is in a trace.
    assert "python_server" not in fork.stderr


def wait_until(holds):
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    assert holds()


def test_streams_folder_and_environment_are_those_of_the_call(tmp_path):
    code = "import os, sys; print(sys.stdin.read(), os.getcwd(), os.environ['MINE'], 'PATH' in os.environ)"
    environment = {name: value for name, value in os.environ.items() if name != "PATH"}
    done = run_python("-c", code, input="given", cwd=tmp_path, env={**environment, "MINE": "this"})
    assert done.stdout == f"given {tmp_path} this False\n"


def test_a_fork_has_torch_and_one_thread():
    code = """if True:
        import os, sys
        loaded = [name in sys.modules for name in ("torch", "moe_mlir")]
        print(loaded, len(os.listdir("/proc/self/task")))"""
    assert run_python("-c", code).stdout == "[True, True] 1\n"
    assert "[False, False]" in run_python("-c", code, fresh=True).stdout


def test_a_fork_runs_kernels_on_as_many_threads_as_asked_for():
    code = """if True:
        import torch, moe_mlir
        gates, ids = moe_mlir.topk_renorm(torch.arange(64.0).view(8, 8), 2)
        print(torch.get_num_threads(), ids[0].tolist(), (torch.ones(200, 200) @ torch.ones(200, 200)).sum())"""
    for threads in ("1", "3"):
        done = run_python("-c", code, env={**os.environ, "OMP_NUM_THREADS": threads})
        assert done.stdout == f"{threads} [7, 6] tensor(8000000.)\n", done.stderr


def test_what_is_read_at_the_start_needs_a_fresh_process(monkeypatch):
    environment = {**os.environ, "PYTHONHASHSEED": "5", "LD_LIBRARY_PATH": "/none"}
    with pytest.raises(AssertionError, match="expected fresh=True, .*'LD_LIBRARY_PATH', 'PYTHONHASHSEED'"):
        run_python("-c", "", env=environment)
    # A command of a shell becomes an interpreter.
    code = "import os, sys; print('torch' in sys.modules, os.environ['PYTHONHASHSEED'])"
    done = subprocess.run([forked_python(), "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "False 5\n"


def test_a_fork_ends_with_whom_it_works_for(tmp_path):
    code = f"import os, time; open({str(tmp_path / 'id')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", code, timeout=2)
    process = Path("/proc", (tmp_path / "id").read_text())
    wait_until(lambda: not process.exists())
    assert run_python("-c", "print(1)").stdout == "1\n"


def test_what_forks_take_is_counted():
    code = "import time\nwhile time.process_time() < 0.5: pass"
    before = costs.cpu_seconds()
    assert run_python("-c", code).returncode == 0
    assert costs.cpu_seconds() - before > 0.4


def test_a_server_ends_with_its_worker(tmp_path):
    """However that ends; a process that runs ends too, and no folder stays."""
    folder = tmp_path / "served"
    folder.mkdir()
    starts = """if True:
        import subprocess, sys, time
        server = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE)
        time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", starts, PYTHON_SERVER, folder], stdout=subprocess.PIPE,
                          text=True) as worker:
        assert worker.stdout.readline() == "ready\n"
        with subprocess.Popen([folder / "python3", "-c", "import time; print(1, flush=True); time.sleep(60)"],
                              stdout=subprocess.PIPE) as client:
            assert client.stdout.readline() == b"1\n"
            worker.kill()
        assert client.returncode != 0
    wait_until(lambda: not folder.exists())


@pytest.mark.parametrize("arguments, expected", [
    (["-c", "x", "-c"], ("c", "x", ["-c"])), (["-P", "-m", "m", "-W"], ("m", "m", ["-W"])),
    ([__file__], ("file", __file__, [])), (["-W", "error", __file__, "1"], ("file", __file__, ["1"])),
    ([], None), (["-"], None), (["none.py"], None), (["-c"], None), (["-E", "f.py"], None), (["-W"], None)])
def test_arguments_are_read_as_an_interpreter_does(arguments, expected):
    found = python_client.parse(arguments)
    assert (found and (found["kind"], found["what"], found["arguments"])) == expected


def test_what_a_library_set_in_a_worker_is_no_matter(monkeypatch):
    """Lightning and Inductor set these as they are imported, for the rest of the process."""
    program = "import os, sys; print(sorted(os.environ.keys() & set(sys.argv[1:])), 'torch' in sys.modules)"
    names = ["PYTORCH_NVML_BASED_CUDA_CHECK", "TRITON_DEFAULT_FP_FUSION", "MOE_MLIR_LOGS"]
    for name in names[:2]:
        monkeypatch.setenv(name, "1")
    assert run_python("-c", program, *names).stdout.split("] ") == ["[", "True\n"]
    assert run_python("-c", program, *names, env=dict(os.environ)).stdout.split("] ") == ["[", "True\n"]
    monkeypatch.setenv("MOE_MLIR_LOGS", "compile")  # read at the start: an interpreter
    assert run_python("-c", program, *names).stdout == "['MOE_MLIR_LOGS'] False\n"
