"""The reference of the dialect and its passes, from their definitions, split by family.

A page has a line such as `<!-- ops: MoESelectionOps -->`; what `mlir-tblgen` says of the ops of
that file takes its place.
"""

import functools
import importlib
import re
import subprocess
from pathlib import Path

from docstrings import join_spans
from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"
DIALECT = INCLUDE / "MoE" / "Dialect" / "MoE" / "IR"
PASSES = {name: INCLUDE / "MoE" / name / "Passes.td" for name in ("Transforms", "Conversion")}

MARK = re.compile(r"^<!-- (dialect|ops: \w+|attributes|passes: \w+) -->$", re.MULTILINE)
ENTRY = re.compile(r"^### ", re.MULTILINE)
GRAMMAR = re.compile(r"(?<=^Syntax:\n\n```\n)operation ::=.*?(?=^```)", re.MULTILINE | re.DOTALL)
WIDTH = 100  # columns of code on a page


@functools.cache
def generated(prefix, source, *options):
    """What mlir-tblgen writes of one file."""
    prefix = Path(prefix) if prefix else Path(importlib.import_module("mlir").__path__[0])
    done = subprocess.run(
        [prefix / "bin" / "mlir-tblgen", *options, source, "-I", INCLUDE, "-I", prefix / "include"],
        capture_output=True, text=True)
    if done.returncode:
        raise ExtensionError(f"mlir-tblgen {source}: {done.stderr}")
    return done.stdout


def fold(match):
    """A grammar without long lines."""
    lines = []
    for line in match[0].splitlines():
        indent = " " * max(14, len(line) - len(line.lstrip()))
        while len(line) > WIDTH:
            end = line.rindex(" ", 0, WIDTH)
            lines.append(line[:end])
            line = indent + line[end + 1 :]
        lines.append(line)
    return "\n".join(lines) + "\n"


def with_whole_spans(text):
    """Code spans of one line: the second one may begin with a sign, which begins a list."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = ["\n".join(join_spans(part.split("\n"))) for part in parts[::2]]
    return "".join(parts)


def entries(text):
    """Name -> what is said of it. Titles of its parts are no sections: contents list names."""
    found = {}
    for part in ENTRY.split(text)[1:]:
        title, _, body = part.partition("\n")
        name = re.match(r"`?-?([\w.-]+)`?", title)[1]
        in_cpp = re.search(r"\((moe::\w+)\)", title)
        body = with_whole_spans(GRAMMAR.sub(fold, body))
        body = re.sub(r"^####+ (.*?):?$", r"**\1**", body.strip(), flags=re.MULTILINE)
        if in_cpp:
            body += f"\n\nIn C++: `{in_cpp[1]}`"
        found[name] = body
    return found


def section(text, title):
    """The part of the dialect's page under one of its titles."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return entries(match[1])


def ops_of(family):
    """Names of the ops that a file defines, in its order."""
    text = (DIALECT / f"{family}.td").read_text()
    return [f"moe.{name}" for name in
            re.findall(r"^def MoE_\w+\s*:\s*MoE_\w+<\"(\w+)\"", text, re.MULTILINE)]


def attribute_names(page):
    """C++ name -> how the attribute is written."""
    return {name: "#" + re.search(r"#(moe\.\w+)<", body)[1]
            for name, body in section(page, "Attributes").items()}


def attributes(page):
    """How each attribute is written -> what it says. One of an enum lists the enum's cases."""
    names = attribute_names(page)
    enums = section(page, "Enums")
    cases = {name: re.findall(r"^\| \w+ \| `\d+` \| (\S+) \|$", body, re.MULTILINE)
             for name, body in enums.items()}
    found = {}
    for name, body in section(page, "Attributes").items():
        enum = re.search(r"`::mlir::moe::(\w+)` \| an enum of type", body)
        if enum:
            summary = body.partition("\n")[0]
            values = ", ".join(f"`{case}`" for case in cases[enum[1]])
            body = f"{summary}\n\nValues: {values}."
        else:
            used = [name for name in re.findall(r"`::mlir::moe::(\w+)`", body) if name in cases]
            for name_of_enum in dict.fromkeys(used):
                values = ", ".join(f"`{case}`" for case in cases[name_of_enum])
                body += f"\n\nValues of `{name_of_enum}`: {values}."
        found[names[name]] = body
    return dict(sorted(found.items()))


def ops(page):
    """Name -> what is said of an op; its attributes as they are written, not as C++ has them."""
    names = attribute_names(page)

    def row(match):
        attribute, kind, meaning = match.groups()
        written = names.get(kind.rpartition(":")[2])
        return f"| `{attribute}` | {f'`{written}`: ' if written else ''}{meaning} |"

    found = section(page, "Operations")
    for name, body in found.items():
        body = re.sub(r"^<tr><td><code>(\w+)</code></td><td>([\w:]+)</td><td>(.*)</td></tr>$", row,
                      body, flags=re.MULTILINE)
        body = re.sub(r"^<tr><th>.*$", "| Attribute | Description |\n| :-----: | ----------- |",
                      body, flags=re.MULTILINE)
        found[name] = re.sub(r"^</?table>\n", "", body, flags=re.MULTILINE)
    return found


def shown(found, names, label=""):
    return "\n\n".join(f"({label}{name})=\n## `{name}`\n{found[name]}" for name in names)


def replacement(app, mark):
    prefix = app.config.moe_mlir_prefix
    page = generated(prefix, ROOT / "docs" / "MoEDialect.td", "-gen-dialect-doc", "-dialect=moe")
    kind, _, family = mark.partition(": ")
    if kind == "dialect":
        return page[page.index("_") : page.index("[TOC]")]
    if kind == "ops":
        return shown(ops(page), ops_of(family))
    if kind == "passes":
        found = entries(generated(prefix, PASSES[family], "-gen-pass-doc"))
        return shown(found, found, "pass-")
    found = attributes(page)
    return shown(found, found, "attribute-")


def insert(app, docname, source):
    if MARK.search(source[0]):
        for path in (*DIALECT.glob("*.td"), *PASSES.values()):
            app.env.note_dependency(str(path))
    source[0] = MARK.sub(lambda match: replacement(app, match[1]), source[0])


def check(app, env):
    """Each op is on one page."""
    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").rglob("*.md"))
    families = re.findall(r"<!-- ops: (\w+) -->", text)
    shown_ops = [op for family in families for op in ops_of(family)]
    prefix = app.config.moe_mlir_prefix
    page = generated(prefix, ROOT / "docs" / "MoEDialect.td", "-gen-dialect-doc", "-dialect=moe")
    if sorted(shown_ops) != sorted(section(page, "Operations")):
        raise ExtensionError("expected each op of the dialect on one page of docs/reference, "
                             f"found {sorted(shown_ops)}")


def setup(app):
    # Where MLIR is; by default its wheel.
    app.add_config_value("moe_mlir_prefix", "", "env")
    app.connect("source-read", insert)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
