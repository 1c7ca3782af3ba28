"""Links where a page names an op, a class, a rule or a paper.

A code span with the name of a function, a class, an op of the dialect or a pass leads to its
entry in the reference; a label such as E3 or C7 to the rule in the pages of the specification; P0
to P4 to the list of
papers in Methods.md, where they are first named in a section. Rules and terms of the glossary get
anchors.
"""

import functools
import re
import zlib
from pathlib import Path

from docutils import nodes
from sphinx.util.nodes import make_refnode

# The specification has several pages, whose sections are numbered as those of one.
SPEC, METHODS, GLOSSARY = ("Spec", "SpecPapers", "SpecTests"), "Methods", "Glossary"
# E1 to E21 and C1 to C21; features and traps have labels that other pages use otherwise.
LABEL = re.compile(r"\b(?:[EC](?:[1-9]|1\d|2[01])|Trap (?:[1-9]|1[0-3])|P[0234])\b(?!\.\d)")
# Docstrings name pages, and sections of Spec.md, as one finds them in the source tree.
PAGE = re.compile(r"\bdocs/(\w+)\.md(?: (\d+(?:\.\d+)?))?")
# Within the specification.
SECTION = re.compile(r"\bsection (\d+(?:\.\d+)?)\b")
CALL = re.compile(r"([\w.]+)(\([^()]*\))?")
# Names that are more often those of a tensor, or of another library's function.
WORDS = {"attention", "combine", "compile", "dispatch", "doctor", "explain", "export", "load",
         "from_pretrained", "save_pretrained", "simulate",
         "Artifact", "Finding", "Module", "Report"}
# Functions that the package has under its own name.
ALIASES = {"moe_mlir.update_routers": "moe_mlir.nn.update_routers"}


def add_anchors(app, doctree):
    if app.env.docname in SPEC:
        add_rule_anchors(app.env, doctree)
    elif app.env.docname == GLOSSARY:
        for row in doctree.findall(nodes.row):
            row[0]["ids"].append(nodes.make_id("term " + row[0].astext().split(" (")[0]))


def add_rule_anchors(env, doctree):
    """A rule is a row of a table, or an entry of a list, that begins with its label."""
    for node in doctree.findall(lambda n: isinstance(n, (nodes.row, nodes.list_item))):
        match = re.match(r"([EC]\d+)\b", node.astext())
        if match and (isinstance(node, nodes.row) or node.astext()[match.end()] == "."):
            # A row has no anchor in HTML, a cell has.
            target = node if isinstance(node, nodes.list_item) else node[0]
            target["ids"].append(match[1].lower())
            env.rules[match[1]] = env.docname, target["ids"][0]
    for section in doctree.findall(nodes.section):
        number = re.match(r"\d+(\.\d+)?", section[0].astext())
        if number:
            env.rules[number[0]] = env.docname, section["ids"][0]
            if number[0] == "9.4":
                add_trap_anchors(env, section)


def add_trap_anchors(env, section):
    for number, item in enumerate(section.findall(nodes.list_item), 1):
        item["ids"].append(f"trap-{number}")
        env.rules[f"Trap {number}"] = env.docname, f"trap-{number}"


def python_names(env):
    """A name as pages write it -> (page, anchor)."""
    found = {}
    objects = env.get_domain("py").objects
    # Where two have the same last name, the shorter whole one is meant.
    for name, entry in sorted(objects.items(), key=lambda item: (item[0].count("."), item)):
        parts = name.split(".")
        shorter = {".".join(parts[at:]) for at in range(len(parts) - 1)}
        if len(parts) == 2 or parts[1] == "nn" and len(parts) == 3 or entry.objtype == "class":
            shorter.add(parts[-1])
        if parts[1] == "reference":
            shorter = {name, name.partition(".")[2]}
        for short in sorted(shorter - WORDS):
            found.setdefault(short, (entry.docname, entry.node_id))
        if len(parts) == 2:  # an op is one of torch's, too
            found.setdefault(f"torch.ops.moe.{parts[1]}", (entry.docname, entry.node_id))
    for name, other in ALIASES.items():
        found[name] = found[other]
    return found


def dialect_names(env):
    found = {}
    for label, (docname, anchor, _) in env.get_domain("std").labels.items():
        if label.startswith("moe."):
            found[label] = docname, anchor
        elif label.startswith("attribute-"):
            found[label.removeprefix("attribute-")] = docname, anchor
        elif label.startswith("pass-"):
            name = label.removeprefix("pass-")
            found |= dict.fromkeys((name, f"-{name}", f"--{name}"), (docname, anchor))
    return found


@functools.cache
def names_of(env):
    return {**python_names(env), **dialect_names(env)}


def is_plain(node):
    """Not in a title, a link, code, or a signature."""
    while node is not None:
        if isinstance(node, (nodes.title, nodes.reference, nodes.FixedTextElement, nodes.math,
                             nodes.rubric)) or node.tagname.startswith("desc_sig"):
            return False
        node = node.parent
    return True


def is_its_own(node, anchor):
    """Whether a name stands in the entry that it would lead to."""
    while node is not None:
        if node.tagname == "desc" and anchor in node[0].get("ids", ()):
            return True
        if isinstance(node, nodes.section) and anchor in node["ids"]:
            return True
        node = node.parent
    return False


def link(app, docname, place, child):
    target, anchor = place
    return make_refnode(app.builder, docname, target, anchor, child)


def link_names(app, doctree, docname):
    names = names_of(app.env)
    for literal in list(doctree.findall(nodes.literal)):
        match = CALL.fullmatch(literal.astext())
        place = match and names.get(match[1])
        place = place or names.get(literal.astext())
        if place and is_plain(literal.parent) and not is_its_own(literal, place[1]):
            literal.replace_self(link(app, docname, place, literal.deepcopy()))


def section_of(node):
    while node is not None and not isinstance(node, nodes.section):
        node = node.parent
    return node


def place_of(env, match):
    """(page, anchor) of a label, a page or a section; None if there is none."""
    label = match[0]
    if match.re is PAGE:
        if match[1] in SPEC and match[2] in env.rules:
            return env.rules[match[2]]
        return (match[1], "") if match[1] in env.found_docs else None
    if match.re is SECTION:
        return env.rules.get(match[1])
    if label.startswith("P"):
        return METHODS, "papers"
    return env.rules.get(label)


def link_labels(app, doctree, docname):
    patterns = (LABEL, PAGE, SECTION) if docname in SPEC else (LABEL, PAGE)
    seen = set()
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, nodes.literal) or not is_plain(text.parent):
            continue
        pieces, end = [], 0
        found = [match for pattern in patterns for match in pattern.finditer(text)]
        for match in sorted(found, key=lambda match: match.start()):
            label, place = match[0], place_of(app.env, match)
            # Not of the label at the head of its rule, nor of a paper in the list of papers.
            if place is None or is_its_own(text, place[1]):
                continue
            if docname in SPEC and text.startswith(label):
                continue
            where = id(section_of(text)), label
            if label.startswith("P") and where in seen:
                continue
            seen.add(where)
            pieces += [nodes.Text(text[end : match.start()]),
                       link(app, docname, place, nodes.inline("", label))]
            end = match.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(text[end:])])


def resolve(app, doctree, docname):
    link_names(app, doctree, docname)
    link_labels(app, doctree, docname)


def prepare(app, env, docnames):
    """`rules`: label or number of a section -> page of the specification, anchor."""
    if not hasattr(env, "rules"):
        env.rules = {}


def setup(app):
    app.connect("env-before-read-docs", prepare)
    app.connect("doctree-read", add_anchors)
    app.connect("doctree-resolved", resolve)
    # A build takes over what one before it read, if that was with the same extensions.
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return {"env_version": zlib.crc32(sources), "parallel_read_safe": False,
            "parallel_write_safe": True}
