"""Formulas as MathML, which browsers draw without a script and without a network.

docutils translates LaTeX. What it does not know is an error, which stops the build.
"""

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.errors import ExtensionError


def mathml(text, block):
    try:
        return latex2mathml.tex2mathml(text, as_block=block)
    except (MathError, SyntaxError) as error:
        raise ExtensionError(
            f"expected a formula that docutils reads, found {text!r}: {error}"
        ) from error


def visit_inline(translator, node):
    translator.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def visit_block(translator, node):
    # In a box of its own, so that a long formula scrolls and not the page.
    translator.body.append(f'<div class="formula">{mathml(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
