"""A notebook of each tutorial, and a link to it below the page's title.

`-D moe_mlir_execute_notebooks=1` runs them, so that they have their outputs; a notebook that was
executed in an earlier build into the same folder is kept while its page stays the same.
"""

import os
import sys
from pathlib import Path

from docutils import nodes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "utils"))

import make_notebooks  # noqa: E402


def add_link(app, doctree):
    page = app.env.docname
    if page not in make_notebooks.TUTORIALS:
        return
    title = next(doctree.findall(nodes.title))
    link = nodes.reference("", "Download this page as a notebook",
                           refuri=f"notebooks/{page}.ipynb", classes=["notebook"])
    title.parent.insert(title.parent.index(title) + 1, nodes.paragraph("", "", link))


def use_this_tree():
    """Cells find the tools of this build and, for C++, the headers of the sources."""
    import moe_mlir

    tools = Path(moe_mlir.__file__).absolute().parents[2] / "bin"
    os.environ["PATH"] = os.pathsep.join((str(tools), os.environ["PATH"]))
    os.environ.setdefault("SOURCE", str(ROOT))


def write(app, error):
    if error is None and app.builder.format == "html":
        if app.config.moe_mlir_execute_notebooks:
            use_this_tree()
        for page in make_notebooks.TUTORIALS:
            make_notebooks.write_notebook(Path(app.srcdir) / f"{page}.md", Path(app.outdir) / "notebooks",
                                          run=app.config.moe_mlir_execute_notebooks)


def setup(app):
    app.add_config_value("moe_mlir_execute_notebooks", False, "", bool)
    app.connect("doctree-read", add_link)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
