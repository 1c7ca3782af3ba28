"""Mutants of PTX: one synchronisation, wait, fence or bound less.

An operator looks at one statement on one line and gives the texts that may
stand in its place. Lines keep their numbers, so that a finding on a mutant
names the line of the original.
"""

import re
from collections import Counter
from dataclasses import dataclass

PREDICATE = r"(?P<guard>@!?%\w+\s+)?"
OPERATORS = {}


@dataclass(frozen=True)
class Mutant:
    """Statement number `ordinal` that `operator` applies to, in one kernel."""

    operator: str
    ordinal: int
    line: int
    before: str
    after: str
    text: str

    @property
    def key(self):
        return f"{self.operator}#{self.ordinal}"


def operator(pattern, context=False):
    """Registers a function from a match of a whole statement to its texts;
    with `context` it is also given the lines and the number of its line."""

    def register(function):
        name = function.__name__.replace("_", "-")
        with_context = function if context else lambda m, *_: function(m)
        OPERATORS[name] = (re.compile(PREDICATE + pattern + ";"), with_context)
        return function

    return register


def deletion(name, pattern):
    OPERATORS[name] = (re.compile(PREDICATE + pattern + ";"),
                       lambda m, *_: [""])


# --- barriers ----------------------------------------------------------------

deletion("delete-barrier", r"(bar|barrier)(\.cta)?\.(sync|arrive)\b[^;]*")
deletion("delete-warp-barrier", r"bar\.warp\.sync\b[^;]*")
deletion("delete-cluster-barrier", r"barrier\.cluster\.(arrive|wait)[^;]*")


@operator(r"bar\.red\.(?P<op>popc\.u32|and\.pred|or\.pred)\s+"
          r"(?P<d>%\w+), (?P<a>[^,]+), (?P<p>[^;]+)")
def vote_instead_of_barrier(m):
    """The block-wide reduction sees one warp only."""
    if m["op"] == "popc.u32":
        return [f"vote.sync.ballot.b32 {m['d']}, {m['p']}, -1; "
                f"popc.b32 {m['d']}, {m['d']};"]
    mode = {"and.pred": "all", "or.pred": "any"}[m["op"]]
    return [f"vote.sync.{mode}.pred {m['d']}, {m['p']}, -1;"]


# --- cp.async, bulk copies ---------------------------------------------------

deletion("delete-wait", r"cp\.async\.(bulk\.)?wait_(group|all)\b[^;]*")
deletion("delete-commit", r"cp\.async\.(bulk\.)?commit_group")
deletion("delete-copy-arrive", r"cp\.async\.mbarrier\.arrive[^;]*")


@operator(r"cp\.async\.(bulk\.)?wait_group(\.read)?\s+(?P<n>\d+)")
def wait_for_one_group_less(m):
    return [increment(m, "n")]


@operator(r"cp\.async\.bulk\.wait_group(?P<read>)\s+\d+")
def wait_for_reads_only(m):
    return [splice(m, "read", ".read")]


# --- mbarrier ----------------------------------------------------------------

deletion("delete-mbarrier-init", r"mbarrier\.init[^;]*")
deletion("delete-mbarrier-arrive", r"mbarrier\.arrive[^;]*")


@operator(r"mbarrier\.(arrive\.)?expect_tx[^;]*, (?P<n>%?\w+)")
def expect_fewer_bytes(m):
    if m["n"].isdigit():
        return [splice(m, "n", str(int(m["n"]) // 2))]
    return [f"{{ .reg .b32 fewer; sub.u32 fewer, {m['n']}, 16; "
            f"{splice(m, 'n', 'fewer')} }}"]


@operator(r"mbarrier\.(try|test)_wait\S*\s+(?P<p>%?\w+),[^;]*")
def skip_mbarrier_wait(m):
    return [f"setp.eq.u32 {m['p']}, 0, 0;"]


# --- fences, acquire, release ------------------------------------------------

deletion("delete-fence", r"(fence|membar)\.[^;]*")


@operator(r"(membar|fence\.(sc|acq_rel))\.(?P<scope>gl|gpu|sys)")
def fence_for_the_block_only(m):
    return [splice(m, "scope", "cta")]


@operator(r"(ld|st|atom|red)\.(?P<order>acquire|release|acq_rel)\.[^;]*")
def relax_order(m):
    return [splice(m, "order", "relaxed")]


@operator(r"(ld|st)(?P<strong>\.volatile)\.[^;]*")
def weak_instead_of_volatile(m):
    return [splice(m, "strong", "")]


# --- atomics -----------------------------------------------------------------


@operator(r"(?P<name>atom|red)(\.(relaxed|acquire|release|acq_rel))?"
          r"(\.(cta|cluster|gpu|sys))?(?P<space>\.(global|shared(::cluster)?))?"
          r"\.(?P<op>add|min|max|and|or|xor|exch|cas|inc|dec)\.(?P<type>\w+)\s+"
          r"(?P<operands>[^;]+)")
def plain_instead_of_atomic(m):
    operands = re.findall(r"\[[^\]]*\]|[^,\s]+", m["operands"])
    if m["name"] == "red":
        operands.insert(0, None)
    result, address, *values = operands
    space, kind = m["space"] or "", m["type"]
    loaded, stored = "was", "now"
    if m["op"] == "exch":
        change, stored = "", values[0]
    elif m["op"] == "cas":
        change = (f"setp.eq.{kind} hit, was, {values[0]}; "
                  f"selp.{kind} now, {values[1]}, was, hit;")
    else:
        change = f"{m['op']}.{kind} now, was, {values[0]};"
    copy = f"mov.b{kind[1:]} {result}, was;" if result else ""
    return [
        f"{m['guard'] or ''}{{ .reg .{kind} was; .reg .{kind} now; "
        f".reg .pred hit; ld{space}.{kind} {loaded}, {address}; {change} "
        f"st{space}.{kind} {address}, {stored}; {copy} }}"
    ] if not m["guard"] else []


# --- wgmma -------------------------------------------------------------------

deletion("delete-wgmma-fence", r"wgmma\.fence[^;]*")
deletion("delete-wgmma-commit", r"wgmma\.commit_group[^;]*")
deletion("delete-wgmma-wait", r"wgmma\.wait_group[^;]*")


@operator(r"wgmma\.wait_group\S*\s+(?P<n>\d+)")
def wait_for_one_wgmma_less(m):
    return [increment(m, "n")]


@operator(r"wgmma\.mma_async[^;{]*\{[^}]*\}, "
          r"(?P<a>\{(?P<first>%\w+)[^}]*\}|%\w+), (?P<b>%\w+),[^;]*")
def other_descriptor_in_one_warp(m):
    """The second warp of the four reads B 16 bytes further on."""
    return [f"{{ .reg .b64 other; .reg .b32 warp; .reg .pred second; "
            f"mov.u32 warp, %tid.x; and.b32 warp, warp, 96; "
            f"setp.eq.u32 second, warp, 32; add.u64 other, {m['b']}, 1; "
            f"selp.b64 other, other, {m['b']}, second; "
            f"{splice(m, 'b', 'other')} }}"]


@operator(r"wgmma\.mma_async[^;{]*\{(?P<d>%\w+)[^}]*\}, "
          r"(?P<a>\{(?P<first>%\w+)[^}]*\}|%\w+),[^;]*")
def overwrite_register_in_flight(m):
    """A's first register, or where A has a descriptor, the accumulator's."""
    touched = m["first"] or m["d"]
    kind = "f" if touched.startswith("%f") else "b"
    return [f"{m.group(0)} mov.{kind}32 {touched}, {touched};"]


# --- registers of a block ----------------------------------------------------


@operator(r"setmaxnreg\.dec\S*\s+(?P<n>\d+)")
def give_fewer_registers(m):
    return [splice(m, "n", str(int(m["n"]) + 8))]


@operator(r"setmaxnreg\.inc\S*\s+(?P<n>\d+)")
def take_more_registers(m):
    return [splice(m, "n", str(int(m["n"]) + 16))]


@operator(r"setmaxnreg\.\S*\s+(?P<n>\d+)")
def skip_setmaxnreg_in_one_warp(m):
    return [f"{{ .reg .b32 warp; .reg .pred second; mov.u32 warp, %tid.x; "
            f"and.b32 warp, warp, 96; setp.eq.u32 second, warp, 32; "
            f"@second bra SKIP; {m.group(0)} SKIP: }}"]


# --- tensor maps -------------------------------------------------------------

deletion("delete-map-field", r"tensormap\.replace[^;]*")


@operator(r"tensormap\.cp_fenceproxy\S*\s+\[(?P<to>[^\]]+)\], "
          r"\[(?P<from>[^\]]+)\][^;]*")
def copy_map_without_release(m):
    """Every lane copies a word of it, which is what the copy does less the
    fence."""
    return [f"{{ .reg .b32 word, place, lane; .reg .b64 far; "
            f"mov.u32 lane, %laneid; shl.b32 lane, lane, 2; "
            f"add.u32 place, {m['from']}, lane; ld.shared.b32 word, [place]; "
            f"cvt.u64.u32 far, lane; add.u64 far, {m['to']}, far; "
            f"st.global.b32 [far], word; bar.warp.sync -1; }}"]


# --- registers that nothing has written --------------------------------------


@operator(r"mov\.f32\s+(?P<d>%\w+), (?P<s>0f[0-9A-F]{8})")
def leave_accumulator_unwritten(m):
    """It begins with what no instruction has written."""
    return [f"{{ .reg .f32 never; {splice(m, 's', 'never')} }}"]


# --- ranges of mbarriers -----------------------------------------------------


@operator(r"mbarrier\.init\S*\s+\[[^\]]*\], (?P<n>%?\w+)")
def wait_for_one_arrival_more(m):
    return [f"{{ .reg .b32 more; add.u32 more, {m['n']}, 1; "
            f"{splice(m, 'n', 'more')} }}"]


@operator(r"mbarrier\.init\S*\s+\[[^\]]*\], (?P<n>%?\w+)")
def count_beyond_the_range(m):
    return [splice(m, "n", "1048576")]


# --- warp collectives --------------------------------------------------------


@operator(r"(shfl|vote|match|redux)\.sync[^;]*, (?P<mask>-1|0x[fF]{8})")
def drop_lane_from_mask(m):
    return [splice(m, "mask", "0x7fffffff")]


@operator(r"(?P<call>(shfl|vote|match|redux)\.sync[^;]*, (?P<mask>%\w+))")
def drop_lane_from_computed_mask(m):
    """Lane 0 stays, as a mask may consist of it alone."""
    return [f"{{ .reg .b32 fewer; and.b32 fewer, {m['mask']}, 0x55555555; "
            f"{splice(m, 'mask', 'fewer')} }}"]


@operator(r"bar\.warp\.sync\s+(?P<mask>-1)")
def drop_lane_from_warp_barrier(m):
    return [splice(m, "mask", "0x7fffffff")]


# --- bounds ------------------------------------------------------------------


@operator(r"setp\.(?P<cmp>lt|le|gt|ge)\.(?P<type>[su]\d+)\s+"
          r"(?P<p>%\w+), (?P<a>[^,]+), (?P<b>[^;]+)", context=True)
def widen_bound_by_one(m, lines, here):
    """One lane, turn or element more passes the guard or the loop's test."""
    branch = next((use for use in (
        re.match(rf"\s*@(!?){m['p']}\s+bra(\.uni)?\s+([\w$]+);", s)
        for s in lines[here + 1: here + 40]) if use), None)
    if not branch:
        return []
    backward = is_backward(lines, here, branch[3])
    more_often = backward != (branch[1] == "!")
    strict, loose = {"lt": "lt", "le": "lt", "gt": "gt", "ge": "gt"}, {
        "lt": "le", "le": "le", "gt": "ge", "ge": "ge"}
    compare = (loose if more_often else strict)[m["cmp"]]
    if compare != m["cmp"]:
        return [splice(m, "cmp", compare)]
    # No comparison says it: move the bound itself.
    step = 1 if (m["cmp"] in ("lt", "le")) == more_often else -1
    if not m["b"].startswith("%"):
        bound = int(m["b"]) + step
        return [splice(m, "b", str(bound))] if bound >= 0 else []
    return [f"{{ .reg .{m['type']} edge; "
            f"add.{m['type']} edge, {m['b']}, {step}; "
            f"{splice(m, 'b', 'edge')} }}"]


@operator(r"bra(\.uni)?\s+(?P<label>[\w$]+)", context=True)
def remove_guarding_branch(m, lines, here):
    # Without its back edge a loop is another program, not a weaker guard; the
    # spin of a wait is mutated through its predicate.
    if is_backward(lines, here, m["label"]):
        return []
    return [""] if m["guard"] else []


@operator(r"(?P<rest>(ld|st|atom|red|cp)\.[^;]*)")
def remove_guard(m):
    return [m["rest"] + ";"] if m["guard"] else []


# --- the machinery -----------------------------------------------------------


def splice(m, group, text):
    """The matched statement with one group replaced."""
    whole, start = m.group(0), m.start()
    return whole[: m.start(group) - start] + text + whole[m.end(group) - start:]


def increment(m, group):
    return splice(m, group, str(int(m[group]) + 1))


def end_of_body(lines, start):
    """The line of the brace that closes the body; inline assembly may have its own."""
    depth = 0
    for i in range(start, len(lines)):
        code = re.sub(r'//.*|"[^"]*"', "", lines[i])
        depth += code.count("{") - code.count("}")
        if depth == 0 and "}" in code:
            return i
    raise ValueError(f"expected the end of the entry in line {start + 1}, found none")


def isolate(lines, kernel):
    """Blanks the other kernels; gives the range of the kernel's body."""
    kept = list(lines)
    body = None
    starts = [i for i, s in enumerate(lines)
              if re.match(r"\s*(\.visible |\.weak )?\.entry ", s)]
    for start in starts:
        end = end_of_body(lines, start)
        if re.search(rf"\.entry {kernel}\(", lines[start]):
            body = range(start, end)
        else:
            for i in range(start, end + 1):
                kept[i] = ""
    if body is None:
        raise ValueError(f"expected an entry named {kernel}, found none")
    return kept, body


def matches(pattern, lines, body):
    """The statements that match: one a line, or several behind braces."""
    for i in body:
        code = lines[i].split("//")[0]
        starts = re.finditer(r"(^|[;{])\s*(?=[@\w])", code)
        for m in (pattern.match(code, start.end()) for start in starts):
            if m:
                yield i, m


def is_backward(lines, here, label):
    return any(s.strip() == f"{label}:" for s in lines[:here])


def mutants(text, kernel):
    """Every mutant of a kernel, in order of operator and line."""
    lines, body = isolate(text.split("\n"), kernel)
    found, ordinals = [], Counter()
    for name, (pattern, function) in OPERATORS.items():
        for i, m in matches(pattern, lines, body):
            for after in function(m, lines, i):
                line = lines[i][: m.start()] + after + lines[i][m.end():]
                changed = lines[:i] + [line] + lines[i + 1:]
                found.append(Mutant(name, ordinals[name], i + 1,
                                    m.group(0), after, "\n".join(changed)))
                ordinals[name] += 1
    return found
