"""One HTML page of what every pass did to the IR.

    MOE_MLIR_DUMP_DIR=dumps python model.py          # or moe-compile --dump-phases-to=dumps/model
    moe phases dumps -o phases.html

The page needs nothing but itself: a list of the passes that changed the IR,
with the lines that each added and removed, and for each the difference from the
pass before and the whole text. Values that only got another number (%12 became
%14) count as unchanged.
"""

import difflib
import html
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._support import files
from .._support.command_line import Parser

_SUFFIXES = (".mlir", ".ll", ".s", ".ptx")
_CONTEXT = 3
# Above this many lines a difference says "everything" and takes minutes to find.
_MOST_LINES = 20_000


@dataclass(frozen=True)
class Phase:
    """The text after one pass; `changes` are (mark, line) pairs, mark one of "+- @"."""

    name: str
    text: str
    changes: list

    @property
    def added(self) -> int:
        return sum(mark == "+" for mark, _ in self.changes)

    @property
    def removed(self) -> int:
        return sum(mark == "-" for mark, _ in self.changes)


def read_phases(folder: str | os.PathLike[str]) -> list[Phase]:
    """The phases of one compilation in order."""
    phases: list[Phase] = []
    before: list[str] = []
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in _SUFFIXES and re.match(r"\d+-", path.name):
            text = path.read_text(errors="replace")
            lines = text.splitlines()
            # Another language is no difference of the one before.
            same_language = not phases or path.suffix == ".mlir"
            phases.append(Phase(path.name, text,
                                compare(before, lines) if phases and same_language else []))
            before = lines
    return phases


def compare(before: Sequence[str], after: Sequence[str]) -> list[tuple[str, str]]:
    """What changed between two lists of lines, with some lines around."""
    if max(len(before), len(after)) > _MOST_LINES:
        return [("@", f"more than {_MOST_LINES} lines; compare the files")]
    matcher = difflib.SequenceMatcher(None, [_unnumbered(line) for line in before],
                                      [_unnumbered(line) for line in after], autojunk=False)
    changes = []
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        changes.append(("@", f"line {group[0][3] + 1}"))
        for kind, a, b, c, d in group:
            if kind == "equal":
                changes += [(" ", line) for line in after[c:d]]
            else:
                changes += [("-", line) for line in before[a:b]]
                changes += [("+", line) for line in after[c:d]]
    return changes


def _unnumbered(line):
    """A line without the numbers of its values, maps and types, which every pass deals anew."""
    return re.sub(r"(%(?:arg|c|cst_|dim_|extracted_|inserted_)?|#map|![a-z]+)\d+", r"\1", line)


# ---------------------------------------------------------------------- HTML

_STYLE = """
body{font:14px sans-serif;margin:0;display:flex;color:#0f172a}
nav{width:22em;height:100vh;overflow:auto;position:sticky;top:0;background:#f1f5f9;padding:1em;
box-sizing:border-box;flex:none}
main{padding:0 1.5em 3em;min-width:0;flex:1}
nav a{display:block;color:inherit;text-decoration:none;padding:2px 4px;font-family:monospace}
nav a:hover{background:#cbd5e1}
pre{background:#f8fafc;border:1px solid #e2e8f0;padding:.6em;overflow:auto;line-height:1.35}
.a{color:#166534}.r{color:#991b1b}
ins{background:#dcfce7;text-decoration:none;display:block}
del{background:#fee2e2;text-decoration:none;display:block}
.h{color:#64748b;display:block}
.o{color:#1d4ed8}.c{color:#64748b}.t{color:#9333ea}.s{color:#0f766e}
"""
_TOKENS = re.compile(
    r"(?P<c>//.*$|^\s*;.*$)|(?P<s>\"(?:[^\"\\]|\\.)*\")|"
    r"(?P<t>\b(?:tensor|memref|vector)<[^<>]*(?:<[^<>]*>[^<>]*)*>|\b(?:index|bf16|[fi]\d+)\b)|"
    r"(?P<o>\b[a-z_]+\.[a-z_0-9.]+\b)")


def _highlight(line):
    pieces, end = [], 0
    for match in _TOKENS.finditer(line):
        pieces.append(html.escape(line[end : match.start()]))
        pieces.append(f'<span class="{match.lastgroup}">{html.escape(match[0])}</span>')
        end = match.end()
    return "".join(pieces) + html.escape(line[end:])


def page(compilations: Mapping[str, Sequence[Phase]]) -> str:
    """The page of `{name: phases}`."""
    links, sections = [], []
    for number, (name, phases) in enumerate(compilations.items()):
        links.append(f"<h3>{html.escape(name)}</h3>")
        sections.append(f"<h1>{html.escape(name)}</h1>")
        for phase in phases:
            anchor = f"p{number}-{phase.name}"
            counts = f'<span class="a">+{phase.added}</span> <span class="r">-{phase.removed}</span>'
            links.append(f'<a href="#{html.escape(anchor)}">{html.escape(phase.name)} {counts}</a>')
            sections.append(_section(anchor, phase))
    return (f"<!doctype html>\n<html><head><meta charset='utf-8'><title>phases</title>"
            f"<style>{_STYLE}</style></head>\n<body><nav>{''.join(links)}</nav>\n"
            f"<main>{''.join(sections)}</main></body></html>\n")


def _section(anchor, phase):
    tags = {"+": "ins", "-": "del"}
    lines = []
    for mark, line in phase.changes:
        if mark == "@":
            lines.append(f'<span class="h">{html.escape(line)}</span>')
        elif mark in tags:
            lines.append(f"<{tags[mark]}>{mark} {_highlight(line)}</{tags[mark]}>")
        else:
            lines.append(f"  {_highlight(line)}\n")
    whole = "\n".join(map(_highlight, phase.text.splitlines()))
    difference = f"<pre>{''.join(lines)}</pre>" if lines else ""
    state = "" if lines else " open"
    return (f'<h2 id="{html.escape(anchor)}">{html.escape(phase.name)}</h2>\n{difference}'
            f"<details{state}><summary>the whole text, {len(phase.text.splitlines())} lines</summary>"
            f"<pre>{whole}</pre></details>\n")


def read_folder(folder: str | os.PathLike[str]) -> dict[str, list[Phase]]:
    """`{name: phases}` of a folder of phases, or of all the folders of phases in it."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"expected a folder of phases at {root}, found none; MOE_MLIR_DUMP_DIR "
                         "or moe-compile --dump-phases-to= make one")
    candidates = [root, *sorted(p for p in root.iterdir() if p.is_dir())]
    found = {path.name or str(path): read_phases(path) for path in candidates}
    found = {name: phases for name, phases in found.items() if phases}
    if not found:
        raise ValueError(f"expected files such as 00-input.mlir in {root} or in its folders, "
                         "found none; MOE_MLIR_DUMP_DIR or moe-compile --dump-phases-to= write them")
    return found


def parser() -> Parser:
    parser = Parser("phases", "Makes one HTML page of what every pass did to the IR.",
                    examples=("moe compile router.mlir -o router.artifact --dump-phases-to=dumps",
                              "moe phases dumps -o phases.html"))
    parser.add_argument("folder", help="what MOE_MLIR_DUMP_DIR or --dump-phases-to= named")
    parser.add_argument("-o", "--output", default="phases.html", metavar="FILE",
                        help="the page to write (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        compilations = read_folder(options.folder)
        files.write(options.output, page(compilations))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}: {len(compilations)} compilation"
          f"{'s' if len(compilations) != 1 else ''}, "
          f"{sum(map(len, compilations.values()))} phases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
