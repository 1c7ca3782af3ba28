"""A `python3` whose processes are forks of `python_server.py`, which writes it into its folder.

Where a fork would not be what an interpreter is, it becomes one: with options that are not known
here, and where variables differ that are read when an interpreter, torch or a library starts.
"""

import array
import marshal
import os
import resource
import signal
import socket
import struct
import sys

# What these begin with is read by what the server has loaded already.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH",
                 "PYTORCH", "CUDA", "HF_", "TRANSFORMERS_", "MOE_MLIR_LOGS", "TRITON_", "LANG", "LC_")


# But these, whenever something is stored; torch sets one of them.
READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# The number of threads, which a fork sets.
THREADS = "OMP_NUM_THREADS"


def changed_at_start(environment: dict, server: dict) -> list:
    """The variables that differ from the server's and that a fork would not read again."""
    return sorted(name for name in {*environment, *server} if name.startswith(READ_AT_START)
                  and name not in READ_LATER and environment.get(name) != server.get(name)
                  and not (name == THREADS and environment.get(name, "").isdecimal()))


def parse(arguments: list):
    """How to run these arguments of an interpreter, or None where only an interpreter knows."""
    options = {"is_safe": False, "warnings": [], "kind": "file"}
    rest = list(arguments)
    while rest and rest[0] in ("-P", "-W"):
        if rest.pop(0) == "-P":
            options["is_safe"] = True
        elif rest:
            options["warnings"].append(rest.pop(0))
    if rest and rest[0] in ("-c", "-m"):
        options["kind"] = rest.pop(0)[1]
    if not rest or options["kind"] == "file" and rest[0].startswith("-"):
        return None
    options["what"], options["arguments"] = rest[0], rest[1:]
    if options["kind"] == "file" and not os.path.isfile(rest[0]):
        return None
    return options


def send(connection, request):
    data = marshal.dumps(request)
    streams = array.array("i", (0, 1, 2))
    connection.sendmsg([struct.pack("Q", len(data))],
                       [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(data)


def receive(connection):
    """(what `send` was given, the three streams)."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    (left,), parts = struct.unpack("Q", size), []
    while left:
        parts.append(connection.recv(left))
        left -= len(parts[-1])
    return marshal.loads(b"".join(parts)), streams


def main(folder):
    options, environment = parse(sys.argv[1:]), dict(os.environ)
    with open(os.path.join(folder, "environment"), "rb") as file:
        differs = changed_at_start(environment, marshal.load(file))
    if options is None or differs:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(folder, "socket"))
        send(connection, dict(options=options, environment=environment, folder=os.getcwd()))
        (status,) = struct.unpack("i", connection.recv(4, socket.MSG_WAITALL))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # there is one of the fork, if any
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(os.path.dirname(os.path.abspath(__file__)))
