"""What is known of one place where a model selects experts."""

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .reading import source, value


@dataclass(frozen=True)
class RouterMatch:
    """One selection of a model: its form, its parameters, and what becomes of it.

    `form` names the family (`moe_mlir.raising.match`). `recognised` says whether the
    site becomes a moe op, and `reason` why not; `left` says which part of a
    recognised router stays as it is, because the op would round it otherwise,
    or because the attention beside it is another than the router asks about.
    `mixing` says how tokens inform each other in front of the selection, where
    that is a moe op or becomes one: "similarity" or "attention".
    `description` is the form in words. `ties` says which of equal scores is
    chosen, and `edges` where a raised router has other gates than torch: in rows
    that are not all numbers, or have nothing to choose from.
    """

    module: str
    location: str
    form: str
    score: str
    k: int
    num_experts: int
    renorm: bool
    scale: float
    bias: bool
    groups: int
    recognised: bool
    reason: str
    eps: float = 0.0
    topk_group: int = 1
    group_score: str = ""
    score_dtype: str = ""
    gate_dtype: str = ""
    left: str = ""
    mixing: str = ""
    description: str = ""
    ties: str = ""
    edges: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = f"{self.module} ({self.location})" if self.module else self.location
        lines = [f"{name}: {self.description}"]
        lines += [x for x in (self.reason, self.left and f"left as it is: {self.left}", self.ties,
                              *self.edges) if x]
        return "\n  ".join(lines)


@dataclass
class Site:
    """A match in the making, with the nodes that a rewrite needs."""

    anchor: Node
    values: Node | None = None
    indices: Node | None = None
    k: int = 1
    score: str = "none"
    kind: str = "logits"
    form: str = "topk"
    scores: Node | None = None   # what the selection op will read
    base: Node | None = None     # the scores before the selection, without bias and groups
    gates: Node | None = None    # the node that holds the final weights
    dense: bool = False          # the gates are spread over all experts
    renorm: bool = False
    eps: float = 0.0
    scale: float = 1.0
    bias: Node | None = None
    groups: int = 1
    topk_group: int = 1
    group_score: str = ""
    fill: float | None = None    # the score of experts in dropped groups
    forced: Node | None = None   # the ids of experts whose gates other scores make (`forced`)
    shared: int = 0              # experts behind the selected ones that every token has, with gates
    reason: str = ""
    left: str = ""
    # Further selections that are part of this router; no sites of their own.
    inner: list[Node] = field(default_factory=list)
    # Calls that write in place and are dead once the site is rewritten.
    writes: list[Node] = field(default_factory=list)
    # The top-1 selections that a sparse mixer makes one after the other.
    rounds: list[tuple[Node, list[Node], list[Node]]] = field(default_factory=list)

    @property
    def source(self) -> Node:
        """What the anchor selects from."""
        return source(self.anchor)

    @property
    def shaped(self) -> Node:
        """The node in whose shape the op reads its scores."""
        return self.source if self.forced is None else self.base

    @property
    def selects(self) -> bool:
        """Whether the anchor is a top-k, and not the look-up of gates for ids that are there."""
        return self.indices is not None

    @property
    def num_experts(self) -> int:
        shape = value(self.source).shape
        return shape[-1] if shape and isinstance(shape[-1], int) else -1

    def reject(self, reason: str) -> None:
        self.reason = self.reason or f"not recognised: {reason}"

    def leave(self, part: str) -> None:
        self.left = f"{self.left}; {part}" if self.left else part


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
