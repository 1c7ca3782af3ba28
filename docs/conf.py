"""Sphinx: `ninja -C build moe-html` builds the manual into build/html without a warning."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

project = "moe-mlir"
author = copyright = "The moe-mlir authors"
release = re.search(r"project\(moe-mlir VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_copybutton",
              "sphinx_design", "dialect", "docstrings", "headers", "mathml", "mlir_lexer", "notebooks",
              "references", "short_cells"]
exclude_patterns = ["**/README.md"]
highlight_language = "none"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

# Signatures as one reads them: torch's names alone, a parameter a line where they are long.
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"moe-mlir {release}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_math_renderer = "mathml"
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# What a program printed is no command.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
