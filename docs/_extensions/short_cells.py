"""Marks short cells of tables, which a style sheet keeps on one line.

A browser breaks `1.1e-06` and `DeepSeek-V3` at the hyphen before it lets a table scroll.
"""

from docutils import nodes

LONGEST = 20


def mark(app, doctree):
    for entry in doctree.findall(nodes.entry):
        if len(entry.astext()) <= LONGEST:
            entry["classes"].append("short")


def setup(app):
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
