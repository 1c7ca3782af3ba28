"""Source locations of graph nodes: the user's lines and the module's path."""

import os
import re
from functools import lru_cache

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_HIDDEN = (os.path.dirname(torch.__file__) + os.sep,
           os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)
# The package's own modules that a user's model is made of stay visible.
_SHOWN = tuple(os.path.join(_HIDDEN[1], name) for name in ("nn", "experts.py", "demo"))
_MAX_FRAMES = 4


def user_frames(node) -> list[tuple[str, int]]:
    """(file, line) of the user's frames, innermost first."""
    return list(_parse_frames(node.meta.get("stack_trace") or ""))


@lru_cache(maxsize=4096)
def _parse_frames(trace: str) -> tuple:
    frames = [(file, int(line)) for file, line in _FRAME.findall(trace)]
    shown = [f for f in frames if os.path.isabs(f[0])
             and (f[0].startswith(_SHOWN) or not f[0].startswith(_HIDDEN))]
    return tuple(reversed(shown))


def module_path(node) -> str:
    """The dotted path of the innermost module that made the node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack and isinstance(stack[-1], tuple) else ""
    return path.removeprefix("L['self'].").removeprefix("wrapped_model").lstrip(".") \
        if isinstance(path, str) else ""


def describe(node) -> str:
    """`model.py:41 (layers.0.moe)` for messages; the parts that are known."""
    frames = user_frames(node)
    path = module_path(node)
    place = f"{frames[0][0]}:{frames[0][1]}" if frames else "unknown line"
    return f"{place} ({path})" if path else place


def mlir_location(node) -> str:
    """The body of a loc(...): call sites, inside the module's path as a name."""
    frames = user_frames(node)[:_MAX_FRAMES]
    if not frames:
        return "unknown"
    places = [f'"{_escape(file)}":{line}:0' for file, line in frames]
    location = places[-1]
    for place in reversed(places[:-1]):
        location = f"callsite({place} at {location})"
    path = module_path(node)
    return f'"{_escape(path)}"({location})' if path else location


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


class LocationTable:
    """Aliases for the locations of a module, so that each is written once."""

    def __init__(self):
        self._aliases: dict[str, str] = {}

    def reference(self, node) -> str:
        body = mlir_location(node)
        if body == "unknown":
            return "loc(unknown)"
        alias = self._aliases.setdefault(body, f"#loc{len(self._aliases)}")
        return f"loc({alias})"

    def definitions(self) -> str:
        return "".join(f"{alias} = loc({body})\n" for body, alias in self._aliases.items())
