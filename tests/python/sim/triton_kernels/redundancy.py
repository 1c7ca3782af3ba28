"""Proofs, from the text of a kernel, that it does not need a synchronisation.

A barrier is redundant where no access before it, back to the barriers before, conflicts with one
behind it, up to the barriers behind: shared memory, the same argument's memory, or mbarriers, and
not both reads; arguments do not overlap. A commit of cp.async is redundant where its copies join
the next group before a wait, if every wait is for all groups, or if it is the first one and every
wait is for whole stages. A wait is redundant where, on every path, another one for as few groups
comes before and no commit since, or comes behind and nothing touches shared memory until then.

Of mbarriers: a bulk load writes when its mbarrier's phase is over, so that no barrier behind it orders
the writes, only those who wait; before a barrier it counts for nothing. An arrival publishes what its
thread knows, and to nobody whom the next barrier of the block does not reach as well. Arrivals and
loads of one phase come in any order. A barrier is needed between a wait and the arrivals of a later
phase, which may come too early. What all threads wait for, each one knows.
"""

import re
from collections import Counter

from mutate import end_of_body

from .traced import keeps_order, waits_of_all

READ, WRITE, INIT, ARRIVE = 1, 2, 4, 8  # Each mbarrier has one INIT, so that two never meet.
SHARED, GLOBAL, MBARRIER = "shared", "global", "mbarrier"
BARRIER = re.compile(r"(bar|barrier)(\.cta)?\.sync\b")
COMMIT = re.compile(r"cp\.async\.commit_group\b")
WAIT = re.compile(r"cp\.async\.wait_(group\s+(?P<n>\d+)|all)")
ARRIVAL = re.compile(r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64")
LOAD = re.compile(r"cp\.async\.bulk\.tensor\.\dd\.shared::cta\.global\.mbarrier::complete_tx::bytes")
PHASE = re.compile(r"mbarrier\.try_wait\.parity\.shared::cta\.b64")
STORE = re.compile(r"cp\.(reduce\.)?async\.bulk\..*bulk_group\b")
# What another block may have written in between, and into which registers it goes.
ASKS = re.compile(r"(atom|ld(?=\S*\.(acquire|volatile|relaxed)))\S*\s+(?P<result>\{[^}]*\}|[^,\s]+)")
REGISTER = re.compile(r"%\w+")
# What a statement does to memory, by the first pattern that matches. What completes or publishes
# asynchronous accesses counts as those accesses.
EFFECTS = [(re.compile(pattern), effects) for pattern, effects in (
    (r"mbarrier\.init", {MBARRIER: INIT}),
    (r"mbarrier\.inval", {MBARRIER: WRITE}),
    (r"mbarrier\.(try|test)_wait", {MBARRIER: READ, SHARED: WRITE, GLOBAL: WRITE}),
    (r"mbarrier\.", {MBARRIER: READ, SHARED: WRITE, GLOBAL: WRITE}),
    (r"cp\.async\.bulk\.(tensor|shared|global|commit|wait)",
     {MBARRIER: READ, SHARED: WRITE, GLOBAL: WRITE}),
    (r"cp\.async\.(ca|cg)\.", {SHARED: WRITE, GLOBAL: READ}),
    (r"cp\.async\.wait", {SHARED: WRITE}),
    (r"cp\.async\.mbarrier", {MBARRIER: READ, SHARED: WRITE}),
    (r"wgmma\.(mma_async|wait_group)", {SHARED: READ}),
    (r"ldmatrix|ld(\.\w+)*\.shared", {SHARED: READ}),
    (r"stmatrix|st(\.\w+)*\.shared", {SHARED: WRITE}),
    (r"(atom|red)(\.\w+)*\.shared", {SHARED: WRITE}),
    (r"ld(\.\w+)*\.(param|const|local)|st(\.\w+)*\.local", {}),
    (r"ld(\.\w+)*\.global", {GLOBAL: READ}),
    (r"(st|atom|red)(\.\w+)*\.global", {GLOBAL: WRITE}),
    (r"fence\.proxy\.async\.shared::cta", {MBARRIER: WRITE, SHARED: WRITE}),
    (r"(fence|membar|tensormap|griddepcontrol|setmaxnreg|barrier\.cluster|ld\.|st\.|atom|red\.|call)",
     {MBARRIER: WRITE, SHARED: WRITE, GLOBAL: WRITE}),
)]


class Statements:
    """A kernel's statements as (line, text), and which may follow which."""

    def __init__(self, text, kernel):
        lines = text.split("\n")
        begin = next(i for i, s in enumerate(lines) if re.search(rf"\.entry {kernel}\(", s))
        end = end_of_body(lines, begin)
        self.at, self.labels = [], {}
        for number in range(begin + 1, end):
            code = lines[number].split("//")[0]
            for part in code.split(";"):
                part = part.strip().lstrip("{} \t")
                if label := re.match(r"([\w$]+):\s*", part):
                    self.labels[label[1]] = len(self.at)
                    part = part[label.end():]
                if re.match(r"(@!?%?\w+\s+)?[a-z]", part):
                    self.at.append((number + 1, part))
        header = "\n".join(lines[begin:end])
        self.pointers = set(re.findall(r"\.param \.u64 \.ptr \S+ \.align \d+ (\w+)", header))
        self.definitions = {}
        for i in range(len(self.at)):
            if made := re.match(r"[\w.:]+\s+(%rd?\d+)\s*,", self.code(i)):
                self.definitions.setdefault(made[1], []).append(self.code(i))
        self.next = [self._next(i) for i in range(len(self.at))]
        self.previous = [[] for _ in self.at]
        for i, targets in enumerate(self.next):
            for target in targets:
                if target < len(self.at):
                    self.previous[target].append(i)

    def _next(self, i):
        guarded, code = re.match(r"(@!?%?\w+\s+)?(.*)", self.at[i][1], re.DOTALL).groups()
        targets = [i + 1] if guarded or not re.match(r"(bra|ret|exit|trap)\b", code) else []
        if jump := re.match(r"bra(\.uni)?\s+([\w$]+)", code):
            targets.append(self.labels[jump[2]])
        return targets

    def code(self, i):
        return re.sub(r"^@!?%?\w+\s+", "", self.at[i][1])

    def inputs(self, i):
        """The registers that a statement reads."""
        text = self.at[i][1]
        made = re.match(r"(@!?%?\w+\s+)?(?!st|red|bra)[\w.:]+\s+(\{[^}]*\}|[^,\s]+)", text)
        guard = re.match(r"@!?(%\w+)", text)
        return REGISTER.findall(text[made.end():] if made else text) + [*(guard.groups() if guard else ())]

    def reached(self, start, edges):
        """The statements from `start` on, up to barriers."""
        seen, work = set(), list(edges[start])
        while work:
            i = work.pop()
            if i not in seen and i < len(self.at) and not BARRIER.match(self.code(i)):
                seen.add(i)
                work += edges[i]
        return seen

    def always_meets(self, i, edges, wanted, forbidden):
        """Whether every path from a statement meets a wanted one before it ends or is forbidden."""
        seen, work = set(), list(edges[i]) or [None]
        while work:
            k = work.pop()
            if k is None or k >= len(self.at):
                return False
            if k in seen or wanted(k):
                continue
            if forbidden(k):
                return False
            seen.add(k)
            work += edges[k] or [None]
        return True

    def _roots(self, register, depth=0):
        """The pointer parameters that a register is computed from by additions."""
        made = self.definitions.get(register, [])
        if len(made) != 1 or depth > 32:
            return set()
        operation, *operands = re.findall(r"[\w.$%]+", made[0])
        if operation.startswith("ld.param"):
            return {operands[1]} & self.pointers
        if operation.startswith("mad."):
            return self._roots(operands[3], depth + 1)
        if re.match(r"add\.[su]64|mov\.[bu]64|cvta", operation):
            return set().union(*(self._roots(o, depth + 1) for o in operands[1:]))
        return set()

    def argument(self, i):
        """The parameter that a global access's address comes from, if it is one."""
        register = re.search(r"\[\s*(%rd\d+)", self.code(i))
        roots = self._roots(register[1]) if register else set()
        return roots.pop() if len(roots) == 1 else None

    def barrier_object(self, i):
        """Which mbarrier: its offset in shared memory, if that is a constant."""
        register = re.search(r"\[\s*(%r\d+)", self.code(i))
        made = self.definitions.get(register[1], []) if register else []
        base = re.match(r"add\.s32\s+%r\d+, (%r\d+), (\d+)$", made[0]) if len(made) == 1 else None
        symbol = self.definitions.get(base[1], []) if base else []
        return base[2] if len(symbol) == 1 and re.search(r"global_smem$", symbol[0]) else None

    def place(self, i, space):
        """What of a space the statement touches: an argument's memory, an mbarrier, or all."""
        code = self.code(i)
        if space == GLOBAL and re.match(r"(ld|st|atom|red)\.", code):
            return self.argument(i)
        if space == MBARRIER and re.match(r"mbarrier\.(init|arrive|inval)", code):
            return self.barrier_object(i)
        return None

    def effects_of(self, i, is_before, waits):
        """What a statement does that a barrier behind or before it may have to order."""
        code = self.code(i)
        if LOAD.match(code):
            return {} if is_before else {MBARRIER: ARRIVE, SHARED: WRITE, GLOBAL: READ}
        if ARRIVAL.match(code):
            return {MBARRIER: ARRIVE}
        if PHASE.match(code) and self.at[i][0] in waits:
            return {MBARRIER: READ}
        return next((e for pattern, e in EFFECTS if pattern.match(code)), {})

    def effects(self, places, is_before=False, waits=()):
        """{(space, its part or None for all): what is done to it}."""
        total = {}
        for i in places:
            effects = self.effects_of(i, is_before, waits)
            for space, kind in effects.items():
                key = space, self.place(i, space)
                total[key] = total.get(key, 0) | kind
        return total


def conflict(before, behind):
    uses = READ | ARRIVE
    return bool((before | behind) & WRITE or (before & INIT and behind & uses)
                or (before & uses and behind & INIT) or (before & READ and behind & ARRIVE))


def without_conflict(statements, i, proven=(), waits=()):
    """Why a barrier is redundant, or None.

    `proven` spaces are known to need it not; at the lines `waits` all threads wait for a phase.
    """
    barriers = [statements.code(k) for k in range(len(statements.at))
                if BARRIER.match(statements.code(k))]
    if any(re.sub(r"\s+", " ", code) != "bar.sync 0" for code in barriers):
        return None  # Barriers of some warps separate nothing for the others.
    before = statements.effects(statements.reached(i, statements.previous), True, waits)
    behind = statements.effects(statements.reached(i, statements.next), False, waits)
    for (space, part), one in before.items():
        for (other, other_part), two in behind.items():
            meet = space == other and space not in proven and (part == other_part or None in (part, other_part))
            if meet and conflict(one, two):
                return None
    return "no access before it, since the barriers before, conflicts with one behind it"


def joins_next_group(statements, i):
    """Why a commit of cp.async is redundant, or None."""
    code = [statements.code(k) for k in range(len(statements.at))]
    waits = [int(m["n"] or 0) for m in map(WAIT.match, code) if m]
    groups = [k for k, text in enumerate(code) if COMMIT.match(text)]
    joins = statements.always_meets(i, statements.next, lambda k: COMMIT.match(code[k]),
                                    lambda k: WAIT.match(code[k]))
    if joins and not any(waits):
        return "its copies join the next group before a wait, and every wait is for all groups"
    # Stages of as many groups as the waits count by: two tiles a stage, waits of 0, 2, 4 ..
    stage = next((s for s in (2, 3, 4) if waits and all(n % s == 0 for n in waits)), None)
    if stage is None or len(groups) % stage or i != groups[0]:
        return None
    jumps = [target for k, targets in enumerate(statements.next) for target in targets
             if target != k + 1]
    if min(jumps, default=len(code)) <= i or not joins:
        return None
    return f"its copies join the next group, and every wait leaves whole stages of {stage} groups"


def waits_twice(statements, i):
    """Why a wait for groups of cp.async is redundant, or None."""
    count = int(WAIT.match(statements.code(i))["n"] or 0)

    def is_enough(k):
        other = WAIT.match(statements.code(k))
        return other and k != i and int(other["n"] or 0) <= count

    if statements.always_meets(i, statements.previous, is_enough,
                               lambda k: COMMIT.match(statements.code(k))):
        return "no group was committed since another wait for as few"

    def touches(k):
        return (BARRIER.match(statements.code(k)) or COMMIT.match(statements.code(k))
                or not WAIT.match(statements.code(k)) and (SHARED, None) in statements.effects([k]))

    if statements.always_meets(i, statements.next, is_enough, touches):
        return "another wait for as few groups comes before anything touches shared memory"
    return None


def nothing_to_wait_for(statements, i):
    """Why a wait for groups of bulk copies is redundant, or None."""
    seen, work = set(), [i]
    while work:
        for k in statements.previous[work.pop()]:
            if k not in seen:
                seen.add(k)
                work.append(k)
    if any(STORE.match(statements.code(k)) for k in seen):
        return None
    return "no bulk copy that belongs to a group comes before it"


def asks_other_blocks(statements):
    """Whether a kernel uses what it read of memory that other blocks write meanwhile.

    Then it may spin, or do what only the last block does: another order of the blocks takes other
    paths than those that were traced.
    """
    inputs = [set(statements.inputs(i)) for i in range(len(statements.at))]
    readers = Counter(register for registers in inputs for register in registers)
    for i, own in enumerate(inputs):
        asked = ASKS.match(statements.code(i))
        if asked and ".shared" not in asked[0]:
            if any(readers[r] > (r in own) for r in set(REGISTER.findall(asked["result"]))):
                return True
    return False


def why_redundant(text, kernel, mutant, trace=None):
    """A proof that the mutant of the kernel's text is a correct kernel, or None.

    `trace` returns the traces of launches, which takes seconds: a barrier's share in shared memory is
    proven for these launches, if any launch takes their paths.
    """
    proof = {"delete-barrier": without_conflict, "delete-commit": joins_next_group,
             "delete-wait": waits_twice, "wait-for-one-group-less": waits_twice}.get(mutant.operator)
    if "bulk" in mutant.before:
        proof = nothing_to_wait_for if "wait" in mutant.operator else None
    if not proof:
        return None
    statements = Statements(text, kernel)
    places = [k for k, (line, part) in enumerate(statements.at)
              if line == mutant.line and statements.code(k).split()[0] in mutant.before]
    if len(places) != 1:
        return None
    found = proof(statements, places[0])
    if found or proof is not without_conflict or not trace or asks_other_blocks(statements):
        return found
    traces = trace()
    waits = waits_of_all(text, traces)
    if found := without_conflict(statements, places[0], waits=waits):
        return found
    if not without_conflict(statements, places[0], proven=(SHARED,), waits=waits):
        return None
    if all(keeps_order(text, mutant.line, trace) for trace in traces):
        return "in shared memory, other barriers lie between every two accesses that conflict"
    return None
