"""Colours of MLIR code."""

from pygments.lexer import RegexLexer
from pygments.token import Comment, Keyword, Name, Number, String, Text


class MlirLexer(RegexLexer):
    """Pygments has none for MLIR. It knows no error: any other character is text."""

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
    return {"parallel_read_safe": True, "parallel_write_safe": True}
