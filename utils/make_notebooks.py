#!/usr/bin/env python3
"""Turns tutorials of the manual into notebooks for Jupyter.

    PYTHONPATH=build/python python utils/make_notebooks.py OUT_DIR [PAGE.md ..] [--execute]

A page is the only source of its notebook: text becomes Markdown, a block of Python or of commands
a cell, a block that begins with the name of a file (`# model.py`) a cell that writes that file.
A ```text block is what the block before it prints. It is no cell: with --execute the notebook
has what its cells print here (nbclient and ipykernel), and a test compares the two.
"""

import argparse
import base64
import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples" / "deploy"
TUTORIALS = ("GettingStarted", "OwnRouter", "ReadingIR", "Deploying", "TritonKernels")

FENCE = re.compile(r"^```([a-z]+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:#|//) ([\w.-]+\.[a-z]+)\n")
# Of other pages there are none beside a notebook.
PAGE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)")
IMAGE = re.compile(r"^!\[([^\]]*)\]\(([\w.-]+\.svg)\)$", re.MULTILINE)

# What commands of a page need: the tools.
ENVIRONMENT = '''\
import os
import sys

os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))'''


def agrees(expected, printed):
    """Whether a ```text block shows what was printed; `...` in it is anything.

    A page breaks long lines, so that any white space is the same as any other.
    """
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in expected.strip().split("...")]
    return re.fullmatch(".*".join(parts), printed.strip(), re.DOTALL) is not None


# -------------------------------------------------------------------- cells of a page


def markdown_cell(text):
    text = PAGE_LINK.sub(r"\1", text)
    for match in list(IMAGE.finditer(text)):
        code = base64.b64encode((DOCS / match[2]).read_bytes()).decode()
        text = text.replace(match[0], f"![{match[1]}](data:image/svg+xml;base64,{code})")
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def code_cell(source, **page):
    """`page` says where the cell is from and what the page shows below it."""
    return {"cell_type": "code", "metadata": {"moe_mlir": page}, "source": source.rstrip("\n"),
            "execution_count": None, "outputs": []}


def cell_of(language, body, line):
    """The cell of a block that runs or writes a file; None of one that is only looked at."""
    name = FILE.match(body)
    if name:
        return code_cell(f"%%writefile {name[1]}\n{body}", line=line)
    if language == "sh":
        return code_cell(f"%%bash -e\n{body}", line=line)
    return code_cell(body, line=line) if language == "python" else None


def needed_files(text):
    """The files of examples/deploy that the commands of a page name and no block writes."""
    commands = "".join(body for language, body in FENCE.findall(text) if language == "sh")
    written = {name[1] for _, body in FENCE.findall(text) if (name := FILE.match(body))}
    return [path for path in sorted(EXAMPLES.iterdir())
            if re.search(rf"(?<![\w.]){re.escape(path.name)}\b", commands) and path.name not in written]


def text_cells(text, earlier_code):
    """Markdown, and a cell for each picture that an earlier block has written."""
    start = 0
    for match in IMAGE.finditer(text):
        if f'"{match[2]}"' in earlier_code:
            if text[start : match.start()].strip():
                yield markdown_cell(text[start : match.start()])
            yield code_cell("from IPython.display import SVG, display\n\n"
                            f'display(SVG("{match[2]}"))')
            start = match.end()
    if text[start:].strip():
        yield markdown_cell(text[start:])


def cells_of(text, first_line):
    """The cells of a text that begins on this line of its page."""
    end, earlier_code, last = 0, "", None
    for match in FENCE.finditer(text):
        language, body = match.groups()
        line = text.count("\n", 0, match.start()) + first_line + 1
        cell = cell_of(language, body, line)
        if cell is None and language != "text":
            continue  # stays in the text around it
        between = text[end : match.start()]
        if between.strip():
            yield from text_cells(between, earlier_code)
        if language == "text":
            if last is None:
                raise ValueError(f"line {line}: expected a block that prints this text before it")
            last["metadata"]["moe_mlir"]["printed"] = body
        else:
            yield cell
            earlier_code += body
        last, end = cell, match.end()
    if text[end:].strip():
        yield from text_cells(text[end:], earlier_code)


def notebook_of(page):
    """A page of the manual as a notebook without outputs."""
    text = page.read_text()
    title, _, rest = text.partition("\n")
    cells = [markdown_cell(f"{title}\n\nThis notebook is the page *{title.lstrip('# ')}* of moe-mlir's manual. "
                           "It writes files into the folder that it runs in.")]
    if any(language == "sh" for language, _ in FENCE.findall(text)):
        cells.append(code_cell(ENVIRONMENT))
    cells += [code_cell(f"%%writefile {path.name}\n{path.read_text()}") for path in needed_files(text)]
    cells += cells_of(rest, first_line=2)
    for number, cell in enumerate(cells):
        cell["id"] = f"{page.stem.lower()}-{number}"
    return {"nbformat": 4, "nbformat_minor": 5, "cells": cells, "metadata": {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"}}}


# ------------------------------------------------------------------------ execution


def execute(notebook, folder):
    """The notebook with what its cells print when they run in a folder."""
    import nbclient
    import nbformat
    from traitlets.config import Config

    done = nbformat.from_dict(notebook)
    with tempfile.TemporaryDirectory() as sockets:
        # Files, which other users of the machine cannot read, in the place of ports.
        config = Config({"AsyncKernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}})
        client = nbclient.NotebookClient(
            done, timeout=600, kernel_name="python3", record_timing=False, config=config,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}})
        client.execute(env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))))
    return done


def printed_by(cell):
    return "".join(output["text"] for output in cell["outputs"]
                   if output["output_type"] == "stream" and output["name"] == "stdout")


def digest(notebook):
    """Of what runs; the outputs of an earlier execution are kept as long as it is the same."""
    sources = [cell["source"] for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def write_notebook(page, folder, run=False):
    """Writes the notebook of a page into a folder, executed if asked for; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{page.stem}.ipynb"
    notebook = notebook_of(page)
    if run:
        known = digest(notebook)
        if path.exists() and json.loads(path.read_text())["metadata"].get("executed") == known:
            return path
        with tempfile.TemporaryDirectory() as empty:
            notebook = execute(notebook, empty)
        for cell in notebook["cells"]:  # warnings name folders of this machine
            cell["outputs"] = [output for output in cell.get("outputs", [])
                               if output.get("name") != "stderr"]
        notebook["metadata"]["executed"] = known
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--execute", action="store_true", help="run the cells, and keep what they print")
    args = parser.parse_args()
    for page in args.pages or [DOCS / f"{name}.md" for name in TUTORIALS]:
        print(write_notebook(page, args.out_dir, args.execute))


if __name__ == "__main__":
    main()
