"""What the compiler says while it works, through `logging`.

The loggers lie below "moe_mlir" and are silent as those of any library, unless
the program configures `logging` or the environment asks for them on stderr:

    MOE_MLIR_LOGS=remarks          what the passes did not do, and why
    MOE_MLIR_LOGS=cache,compile    hits and misses; every compilation and its time
    MOE_MLIR_LOGS=all
    TORCH_LOGS=moe_mlir            compilations, among torch's own logs
"""

import functools
import logging
import os
import sys
import warnings
from types import FrameType

from .paths import PREFIX

TOPICS = ("cache", "compile", "remarks")


def logger(topic) -> logging.Logger:
    """The logger "moe_mlir.<topic>"."""
    assert topic in TOPICS
    _follow_environment()
    return logging.getLogger(f"moe_mlir.{topic}")


@functools.cache
def _follow_environment():
    logging.getLogger("moe_mlir").addHandler(logging.NullHandler())
    show(os.environ.get("MOE_MLIR_LOGS", ""))


def show(setting, stream=None):
    """Sends the topics of a MOE_MLIR_LOGS text to stderr, or to a stream."""
    names = [name.strip() for name in setting.split(",") if name.strip()]
    unknown = sorted(set(names) - {*TOPICS, "all"})
    if unknown:
        warnings.warn(f"expected MOE_MLIR_LOGS to hold {', '.join(TOPICS)} or all, found "
                      f"{', '.join(unknown)}", RuntimeWarning, stacklevel=2)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    for topic in TOPICS if "all" in names else sorted(set(names) - set(unknown)):
        one = logging.getLogger(f"moe_mlir.{topic}")
        one.setLevel(logging.DEBUG)
        one.addHandler(handler)
        # A program that configures logging as well would print it twice.
        one.propagate = False


def warn_user(message) -> None:
    """A UserWarning at the line that called into this package."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PREFIX):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
