"""Dropless execution of the experts that a router selected; `run` says how."""

from ..ops._expert_activation import ExpertActivation
from .run import run_experts, run_rows

__all__ = ["ExpertActivation", "run_experts", "run_rows"]


def __dir__() -> list[str]:
    return sorted(__all__)
