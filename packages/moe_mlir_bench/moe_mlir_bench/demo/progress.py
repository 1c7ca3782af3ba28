"""A progress bar on stderr; silent where stderr is no terminal."""

import sys
import time
from typing import TextIO

from moe_mlir._support.progress import is_shown


class Progress:
    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label, self.total = label, total
        self.stream = stream or sys.stderr
        self.shown = is_shown(self.stream)
        self.start = self.last = time.monotonic()

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if not self.shown or (now - self.last < 0.1 and done < self.total):
            return
        self.last = now
        filled = 30 * done // self.total
        left = (now - self.start) / max(done, 1) * (self.total - done)
        self.stream.write(f"\r{self.label} [{'#' * filled}{'.' * (30 - filled)}] "
                          f"{done}/{self.total} {note} {left:4.0f} s left\033[K")
        if done >= self.total:
            self.stream.write("\n")
        self.stream.flush()
