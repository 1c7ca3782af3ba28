"""Sphinx: `ninja -C build moe-html` builds the manual into build/html without a warning."""

import re
from pathlib import Path

from pygments.lexer import RegexLexer
from pygments.token import Comment, Keyword, Name, Number, String, Text

ROOT = Path(__file__).resolve().parents[1]

project = "moe-mlir"
release = re.search(r"project\(moe-mlir VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "alabaster"
html_theme_options = {"fixed_sidebar": True, "page_width": "72em"}
highlight_language = "none"


class MlirLexer(RegexLexer):
    """Pygments has none for MLIR."""

    name = "MLIR"
    tokens = {
        "root": [
            (r"//.*", Comment.Single),
            (r'"(?:[^"\\]|\\.)*"', String),
            (r"%[\w#.$-]+", Name.Variable),
            (r"[@^#!][\w.$-]+", Name.Label),
            (r"\b[a-z_]+\.[a-z_0-9.]+", Name.Function),
            (r"\b(?:tensor|memref|vector|index|bf16|[fi]\d+)\b", Keyword.Type),
            (r"-?\b\d[\d.e+-]*", Number),
            (r"\w+|\s+|.", Text),
        ]
    }


def setup(app):
    app.add_lexer("mlir", MlirLexer)
