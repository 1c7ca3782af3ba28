"""The routing ops as the routers call them: compiled, or their meaning without a kernel."""

from ..reference import *  # noqa: F403
from ..ops import *  # noqa: F403  # isort: skip  a kernel takes its meaning's name over
