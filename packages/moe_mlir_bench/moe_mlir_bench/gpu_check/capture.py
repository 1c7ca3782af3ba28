"""Calls captured in a CUDA graph: replayed on other inputs, they give what a call gives."""

from dataclasses import dataclass

import torch

from . import cases
from .case import Case, Problem, _arrays, _bits, _tuple
from .target import Target


@dataclass(frozen=True)
class Capture:
    case: Case
    group: str = "forms"
    limit: float = 20.0
    model: float = 0.5

    @property
    def name(self) -> str:
        return f"{self.case.name} captured"

    def run(self, target: Target) -> dict:
        if target.device != "cuda":
            return {"not_run": "the simulator captures on the driver's interface only "
                               "(tests/python/gpu/test_host_path.py)"}
        inputs = [x.to(target.torch_device) for x in self.case.inputs()]
        with target.active(self.case.chip):
            # Loads the kernels, which a capture does not permit.
            self.case.call(*inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = _tuple(self.case.call(*inputs))
            for x in inputs:
                x.copy_(x.flip(tuple(range(x.dim()))))
            graph.replay()
            target.synchronize()
            once = _tuple(self.case.call(*inputs))
            target.synchronize()
        for i, (a, b) in enumerate(zip(captured, once, strict=True)):
            if not torch.equal(_bits(a.detach()), _bits(b.detach())):
                raise Problem(f"result {i} of the replay is not that of a call",
                              _arrays(inputs, replay=a, call=b))
        return {}


def all_captures() -> list[Capture]:
    bf16 = torch.bfloat16
    return [Capture(case) for case in (
        cases.selection_case(130, 128, 8, bf16),
        cases.router_case(128, 4096, 8, bf16, 70),
        cases.similarity_case(150, 64, 24, bf16, True),
        cases.attention_case(2, 150, 128, bf16),
        cases.dispersion_case(300, 64, 16),
        cases.adjacency_case(300, 64, 8),
        cases.dispatch_case(300, 64, 8),
    )]
