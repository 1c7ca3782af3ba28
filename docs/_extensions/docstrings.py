"""Docstrings as reStructuredText.

They are read in editors and by `help` more often than on these pages, so they have the
backticks of Markdown, formulas with bars, and code that is only indented.
"""

import re

LITERAL = re.compile(r"(?<!`)`([^`]+)`(?!`)")
# What would begin a substitution, emphasis or a reference: |x|, *args, name_.
MARKUP = re.compile(r"[|*\\]|(?<=\w)_(?!\w)")


def escape(text):
    """The text between two code spans."""
    return MARKUP.sub(lambda match: "\\" + match[0], text)


def line_as_rst(line):
    if line.lstrip().startswith((">>> ", "... ")):
        return line
    text = "".join(f"``{part}``" if index % 2 else escape(part)
                   for index, part in enumerate(LITERAL.split(line)))
    # A span may be part of a word: "`Tensor`s".
    return re.sub(r"(?<=\w``)(?=\w)", r"\\ ", text)


def join_spans(lines):
    """A code span that goes over the end of a line: its lines as one."""
    joined = []
    for line in lines:
        if joined and joined[-1].count("`") % 2 and line.strip():
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
    return joined


def indentation(line):
    return len(line) - len(line.lstrip())


def as_rst(lines):
    """Example code is indented, behind an empty line and a line that ends with a colon."""
    found, code, result = [], None, False
    for line in join_spans(lines):
        if code is not None and line.strip() and indentation(line) <= code:
            code = None
        if code is not None:
            found.append(line)
            continue
        before = next((other for other in reversed(found) if other.strip()), "")
        if (line.strip() and found and not found[-1].strip() and before.endswith(":")
                and indentation(line) > indentation(before)
                and not line.lstrip().startswith(">>>")):
            code = indentation(before)
            found[-1:] = ["", " " * code + ".. code-block:: python", ""]
            found.append(line)
            continue
        # The result of an example goes on to the next empty line.
        result = line.lstrip().startswith(">>> ") or (result and bool(line.strip()))
        found.append(line if result else line_as_rst(line))
    return found


def process(app, what, name, obj, options, lines):
    lines[:] = as_rst(lines)


def setup(app):
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
