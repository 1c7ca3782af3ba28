"""Artifacts of moe-compile: folders with a manifest and code.

Loading and calling one needs neither torch nor the compiler's passes.
"""

from .decoder import ArtifactDecoder
from .functions import ArtifactFunction, KernelFunction
from .loading import Artifact, load
from .program import ArtifactProgram

__all__ = ["Artifact", "ArtifactDecoder", "ArtifactFunction", "ArtifactProgram", "KernelFunction", "load"]
