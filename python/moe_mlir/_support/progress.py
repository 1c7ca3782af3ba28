"""Progress on the terminal: a clock beside what takes long."""

import os
import sys
import threading
import time


def is_shown(stream) -> bool:
    """Whether someone watches: a terminal, unless MOE_MLIR_PROGRESS=0, on the first rank alone."""
    return (stream is not None and stream.isatty() and os.environ.get("MOE_MLIR_PROGRESS") != "0"
            and os.environ.get("RANK", "0") == "0")


class Clock:
    """While the block runs, and once it has run for `delay` seconds: the label and the seconds.

    The line goes when the block ends. Without a terminal nothing is written.
    """

    def __init__(self, label, *, delay=2.0, stream=None):
        self.label, self.delay = label, delay
        self.stream = stream or sys.stderr
        self._done = threading.Event()
        self._thread = None

    def __enter__(self):
        if is_shown(self.stream):
            self._thread = threading.Thread(target=self._tick, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error):
        if self._thread is not None:
            self._done.set()
            self._thread.join()

    def _tick(self):
        start = time.monotonic()
        pause, shown = self.delay, False
        while not self._done.wait(pause):
            self.stream.write(f"\r{self.label} ({time.monotonic() - start:.0f} s)\033[K")
            self.stream.flush()
            pause, shown = min(1.0, self.delay), True
        if shown:
            self.stream.write("\r\033[K")
            self.stream.flush()
