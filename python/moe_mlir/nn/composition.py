"""Which method stands on which router: `python -m moe_mlir.nn.composition`.

The matrix is made of the classes of `moe_mlir.nn` by building every pair. With
`--write FILE` the command puts it between the two marks of a page.
"""

import inspect
from typing import Any

from .. import nn
from .._support.page_table import PageTable

_ABSTRACT = (nn.Router, nn.LinearRouter, nn.ComposedRouter)
# Keywords without a default, at a value that every pair takes.
_REQUIRED = dict(causal=True, vocabulary=16)


def routers() -> list[type[nn.Router]]:
    """All router classes, by name."""
    classes = [getattr(nn, name) for name in sorted(nn.__all__)]
    return [c for c in classes if isinstance(c, type) and issubclass(c, nn.Router)
            and c not in _ABSTRACT]  # fmt: skip


def build(cls: type[nn.Router], base: nn.Router | None = None) -> nn.Router:
    """A small router of the class, on the base."""
    parameters = inspect.signature(cls).parameters
    k: Any = parameters["k"].default if "k" in parameters else inspect.Parameter.empty
    k = 2 if k in (None, inspect.Parameter.empty) else k
    required: dict[str, Any] = {name: value for name, value in _REQUIRED.items() if name in parameters}
    if base is None:
        return cls(8, 8, k, **required)
    return cls(8, 8, base.k, base=base, **required)


def refusal(method: type[nn.Router], base: type[nn.Router]) -> str | None:
    """Why the method does not stand on the base; None if it does."""
    lower = build(base)
    try:
        build(method, lower)
    except ValueError as error:
        return str(error)
    return None


def _reason(message: str | None) -> str:
    """What a refusal says behind what it expected and found."""
    assert message is not None
    return message.split(": ", 2)[2]


def table() -> str:
    """The matrix as Markdown: rows are bases, columns the methods that take one."""
    classes = routers()
    methods = [c for c in classes if issubclass(c, nn.ComposedRouter)]
    cells = {(m, b): refusal(m, b) for m in classes for b in classes}
    notes: list[str] = []

    def cell(method: type[nn.Router], base: type[nn.Router]) -> str:
        message = cells[method, base]
        if message is None:
            return "yes"
        reason = _reason(message)
        if reason not in notes:
            notes.append(reason)
        return f"no ({notes.index(reason) + 1})"

    lines = [f"| base | {' | '.join(m.__name__ for m in methods)} |", "|---" * (len(methods) + 1) + "|"]
    for base in classes:
        lines.append(f"| `{base.__name__}` | {' | '.join(cell(m, base) for m in methods)} |")
    lines += ["", *(f"{i}. {reason}." for i, reason in enumerate(notes, 1)), ""]
    lines.append("The other routers take no `base`:")
    lines.append("")
    sources: dict[str, list[str]] = {}
    for cls in classes:
        if cls not in methods:
            sources.setdefault(_reason(cells[cls, nn.SMoE]), []).append(f"`{cls.__name__}`")
    lines += [f"- {', '.join(names)}: {source}." for source, names in sources.items()]
    computed = sum(message is None for message in cells.values())
    lines += ["", f"{len(cells)} pairs: {computed} computed, {len(cells) - computed} refused."]
    return "\n".join(lines)


_TABLE = PageTable("python -m moe_mlir.nn.composition", table)
page_with_table = _TABLE.on_page


if __name__ == "__main__":
    _TABLE.run(__doc__.splitlines()[0])
