"""Serves Python processes that start with torch loaded: forks of one that has imported it.

    python python_server.py FOLDER MODULE..

`support.run_python` starts it, once for each worker of the tests, and ends it by closing its stdin.
FOLDER gets `python3`, a client that takes an interpreter's place: it hands over its arguments,
folder, environment and streams, and ends as the fork does. What a fork shares with others is what
importing modules leaves behind; the server itself runs no kernel and has one thread.
"""

import atexit
import contextlib
import gc
import importlib
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import types
from pathlib import Path

import python_client


class Server:
    """Forks a process for each connection, and answers with its wait status when it has ended."""

    def __init__(self, folder: Path):
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._stop)
        self._running: dict[int, int] = {}  # process id -> its file descriptor
        self._is_over = False

    def serve(self):
        """Returns twice: with a request, in a process of its own, and with None at the end."""
        while not self._is_over:
            for key, _ in self._selector.select():
                request = key.data(key.fileobj)
                if request is not None:
                    return request
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return None

    def _stop(self, _):
        self._is_over = True

    def _accept(self, listener):
        connection, _ = listener.accept()
        request, streams = python_client.receive(connection)
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            for open_one in (listener, connection):
                open_one.close()
            for descriptor in self._running.values():
                os.close(descriptor)
            return request, streams
        for stream in streams:
            os.close(stream)
        self._running[pid] = os.pidfd_open(pid)
        self._selector.register(self._running[pid], selectors.EVENT_READ,
                                lambda _: self._finish(pid, connection))
        # A client has no more to say: what comes is that it has ended.
        self._selector.register(connection, selectors.EVENT_READ,
                                lambda _: self._abandon(pid, connection))
        return None

    def _abandon(self, pid, connection):
        if pid in self._running:
            self._selector.unregister(connection)
            os.kill(pid, signal.SIGKILL)

    def _finish(self, pid, connection):
        _, status = os.waitpid(pid, 0)
        descriptor = self._running.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        with connection:
            try:
                connection.sendall(struct.pack("i", status))
            except OSError:
                pass  # it has ended
        return None


def become(request, streams):
    """Makes this process the one that was asked for, up to its first line of code."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    threads = request["environment"].get(python_client.THREADS, "")
    if threads.isdecimal() and threads != os.environ.get(python_client.THREADS):
        import torch  # has read the variable already

        torch.set_num_threads(int(threads))
    os.chdir(request["folder"])
    tempfile.tempdir = None  # which follows a variable
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(options: dict):
    """What `python` does with these arguments (`python_client.parse`)."""
    if options["warnings"]:
        import warnings

        for text in options["warnings"]:
            warnings._setoption(text)  # what -W does
    kind, what = options["kind"], options["what"]
    sys.argv = [what if kind == "file" else f"-{kind}", *options["arguments"]]
    if not options["is_safe"]:
        folders = {"c": lambda: "", "m": os.getcwd, "file": lambda: os.path.dirname(os.path.realpath(what))}
        sys.path.insert(0, folders[kind]())
    if kind == "m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if kind == "file":
        module.__file__ = os.path.abspath(what)
        what = compile(Path(what).read_bytes(), module.__file__, "exec")
    exec(what, vars(module))


def end(run_it):
    """Ends this process as an interpreter does, but takes no modules apart, which takes a second."""
    status = 0
    try:
        run_it()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, int | None):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.run_path.__code__.co_filename):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


def main(folder: Path, modules: list):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker's to handle
    # Before the imports, which may set variables.
    (folder / "environment").write_bytes(marshal.dumps(dict(os.environ)))
    # numpy's library of products starts threads when it is loaded, which a fork would not have.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in modules:
        with contextlib.suppress(Exception):  # a fork meets it, too
            importlib.import_module(name)
    sys.path.remove(str(Path(__file__).parent))
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"expected one thread after the imports, found {threads}: a fork would lose them")
    client = folder / "python3"
    client.write_text(f"#!{sys.executable} -IS\n{Path(python_client.__file__).read_text()}")
    client.chmod(0o700)
    (folder / "python").symlink_to(client)
    server = Server(folder)
    gc.collect()
    gc.freeze()  # a collection would write to all pages, which then are no longer shared
    print("ready", flush=True)
    if served := server.serve():
        become(*served)
        end(lambda: run(served[0]["options"]))
    shutil.rmtree(folder, ignore_errors=True)  # its worker may have been killed


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
