"""Sphinx: `ninja -C build moe-html` builds the manual into build/html without a warning."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

project = "moe-mlir"
author = copyright = "The moe-mlir authors"
release = re.search(r"project\(moe-mlir VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
extensions = ["myst_parser", "sphinx_copybutton", "sphinx_design", "mathml", "mlir_lexer",
              "short_cells"]
exclude_patterns = ["**/README.md"]
highlight_language = "none"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

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
