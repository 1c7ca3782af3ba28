"""Source locations of graph nodes as MLIR writes them."""

from torch.fx import Node

from ..graph.locations import module_path, user_frames

_MAX_FRAMES = 4


def mlir_location(node: Node) -> str:
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

    def __init__(self) -> None:
        self._aliases: dict[str, str] = {}

    def reference(self, node: Node) -> str:
        body = mlir_location(node)
        if body == "unknown":
            return "loc(unknown)"
        alias = self._aliases.setdefault(body, f"#loc{len(self._aliases)}")
        return f"loc({alias})"

    def definitions(self) -> str:
        return "".join(f"{alias} = loc({body})\n" for body, alias in self._aliases.items())
