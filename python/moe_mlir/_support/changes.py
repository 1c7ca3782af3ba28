"""What a function did to the modules of a model, and what it left as it was."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch


class Changes(int):
    """The number of layers, or routers, that were changed, and which.

    Attributes:
        changed: name of a module -> what it is now.
        kept: name of a module that looks as if it were meant -> why it stays as it is.

    >>> layer = moe_mlir.nn.MoELayer(moe_mlir.nn.SMoE(64, 8, 2), d_hidden=128)
    >>> done = moe_mlir.quantize(torch.nn.Sequential(layer), "int4")
    >>> done
    1
    >>> print(done.summary())
    1 module changed
      0: MoELayer, int4, group=32
    """

    changed: Mapping[str, str]
    kept: Mapping[str, str]

    def __new__(cls, count: int, changed: Mapping[str, str], kept: Mapping[str, str]) -> Self:
        made = super().__new__(cls, count)
        made.changed = MappingProxyType(dict(changed))
        made.kept = MappingProxyType(dict(kept))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), dict(self.changed), dict(self.kept))

    def summary(self) -> str:
        """Lines for a person: each module that was changed, and each that stays, with the reason."""
        lines = [f"{_modules(len(self.changed))} changed"]
        lines += [f"  {name or 'the model'}: {what}" for name, what in self.changed.items()]
        if self.kept:
            stay = "stays as it is" if len(self.kept) == 1 else "stay as they are"
            lines.append(f"{_modules(len(self.kept))} {stay}")
            lines += [f"  {name or 'the model'}: {why}" for name, why in self.kept.items()]
        return "\n".join(lines)


def _modules(count: int) -> str:
    return f"{count} module" if count == 1 else f"{count} modules"


class Tally:
    """Collects `Changes`; tells of what must not be overlooked."""

    def __init__(self, done: str, tell: Callable[[str], None]) -> None:
        self._done, self._tell = done, tell
        self._changed: dict[str, str] = {}
        self._kept: dict[str, str] = {}

    def change(self, name: str, module: torch.nn.Module, what: str = "") -> None:
        kind = type(module).__name__
        self._changed[name] = f"{kind}, {what}" if what else kind

    def keep(
        self, name: str, module: torch.nn.Module, reason: str, *, silently: bool = False
    ) -> None:
        """`silently`: it stays by design, as the docstring says."""
        self._kept[name] = reason
        if not silently:
            self._tell(f"'{name}' ({type(module).__name__}) is not {self._done}: {reason}")

    def changes(self) -> Changes:
        return Changes(len(self._changed), self._changed, self._kept)


__all__ = ["Changes", "Tally"]
