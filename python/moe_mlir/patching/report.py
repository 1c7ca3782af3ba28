"""What a patch leaves as it is, in one warning."""

import torch

from .._support.log import warn_user


class Kept:
    """Modules that look like routers and keep their forward, grouped by class and reason."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, module: torch.nn.Module, reason: str) -> None:
        self._names.setdefault((type(module).__name__, reason), []).append(name)

    def reasons(self) -> dict[str, str]:
        """Name of a module -> why it stays as it is."""
        return {name: reason for (_, reason), names in self._names.items() for name in names}

    def warn(self) -> None:
        """Says so once, with a line for each class and reason; silent if there is nothing."""
        lines = [_line(kind, names, reason) for (kind, reason), names in self._names.items()]
        if lines:
            warn_user("\n".join(lines))


def _line(kind, names, reason) -> str:
    first, more = names[0], len(names) - 1
    if not more:
        return f"'{first}' ({kind}) stays as it is: {reason}"
    others = "1 other" if more == 1 else f"{more} others"
    return f"'{first}' and {others} ({kind}) stay as they are: {reason}"
