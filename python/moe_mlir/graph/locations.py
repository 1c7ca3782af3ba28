"""Source locations of graph nodes: the user's lines and the module's path."""

import os
import re
from functools import lru_cache

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_HIDDEN = (os.path.dirname(torch.__file__) + os.sep,
           os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)
# The package's own modules that a user's model is made of stay visible.
_SHOWN = tuple(os.path.join(_HIDDEN[1], name) for name in ("nn", "experts.py"))


def user_frames(node: torch.fx.Node) -> list[tuple[str, int]]:
    """(file, line) of the user's frames, innermost first."""
    return list(_parse_frames(node.meta.get("stack_trace") or ""))


@lru_cache(maxsize=4096)
def _parse_frames(trace: str) -> tuple:
    frames = [(file, int(line)) for file, line in _FRAME.findall(trace)]
    shown = [f for f in frames if os.path.isabs(f[0])
             and (f[0].startswith(_SHOWN) or not f[0].startswith(_HIDDEN))]
    return tuple(reversed(shown))


def module_path(node: torch.fx.Node) -> str:
    """The dotted path of the innermost module that made the node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack and isinstance(stack[-1], tuple) else ""
    return path.removeprefix("L['self'].").removeprefix("wrapped_model").lstrip(".") \
        if isinstance(path, str) else ""


def describe_briefly(node: torch.fx.Node) -> str:
    """As `describe`, without the folder: for texts that go into compiled code."""
    frames, path = user_frames(node), module_path(node)
    parts = [f"{os.path.basename(file)}:{line}" for file, line in frames[:1]]
    return " ".join([*parts, *([f"({path})"] if path else [])])


def describe(node: torch.fx.Node) -> str:
    """`model.py:41 (layers.0.moe)` for messages; the parts that are known."""
    frames = user_frames(node)
    path = module_path(node)
    place = f"{frames[0][0]}:{frames[0][1]}" if frames else "unknown line"
    return f"{place} ({path})" if path else place
