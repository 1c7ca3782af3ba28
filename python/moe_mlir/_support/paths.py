"""Where the package lies."""

import os
from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[1]
# What the names of its source files begin with.
PREFIX = str(PACKAGE) + os.sep
