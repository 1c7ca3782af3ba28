"""What tests of several folders share is in `support.py`, importable from all of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
