"""What a launch in the simulator returns."""

from typing import Any, NamedTuple


class _FindingFields(NamedTuple):
    kind: str
    message: str


class Finding(_FindingFields):
    """A pair (kind, message) that also knows where it was found.

    `kind` is "race", "bounds", "uninit", "align", "deadlock", "trap" or
    "equal-stores", a race of two warps that store the same value.
    `line` is the line in the PTX text, `source` "file:line" if the PTX has
    `.loc` directives, `block` a triple, and `other` describes the second
    access of a race. `count` says how often this finding was met.
    """

    kernel: str
    line: int
    source: str
    block: tuple[int, int, int]
    warp: int
    lane: int
    other: str
    count: int  # type: ignore[assignment]  # as reports had it before this was a pair

    def __new__(cls, fields: dict[str, Any]) -> "Finding":
        self = super().__new__(cls, fields["kind"], fields["message"])
        self.kernel = fields["kernel"]
        self.line = fields["line"]
        self.source = fields["source"]
        self.block = tuple(fields["block"])
        self.warp = fields["warp"]
        self.lane = fields["lane"]
        self.other = fields["other"]
        self.count = fields["count"]
        return self


class SharedEvent(NamedTuple):
    """An access to shared memory, or a statement that orders such accesses."""

    #: 0: a statement, 1: a load, 2: a store, 3: both, of an atomic.
    kind: int
    block: int
    warp: int
    #: 32: of no single lane, such as matrix instructions and bulk copies.
    lane: int
    #: In the PTX text.
    line: int
    #: In bytes, from the start of the block's shared memory; of a statement, its lanes as a mask.
    offset: int
    bytes: int


class Report:
    """What one launch found and counted."""

    def __init__(self, fields: dict[str, Any]):
        self.kernel: str = fields["kernel"]
        self.findings: list[Finding] = [Finding(f) for f in fields["findings"]]
        self.counters: dict[str, Any] = fields["counters"]
        #: With `trace_shared`, of each warp in the order of its program.
        self.shared_trace = [SharedEvent._make(e) for e in fields["shared_trace"]]
        self._text: str = fields["text"]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Report {self.kernel}: {len(self.findings)} findings>"
