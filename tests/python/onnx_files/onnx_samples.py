"""Small models, of which most cannot be written."""

import torch

from moe_mlir.experts import run_experts
from moe_mlir.ops._expert_activation import ExpertActivation

RELU2, GELU = ExpertActivation("relu2"), ExpertActivation("gelu")


class Layer(torch.nn.Module):
    def __init__(self, activation=torch.relu, gates=torch.sigmoid):
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.w_in = torch.nn.Parameter(torch.randn(4, 12, 8))
        self.layer.w_out = torch.nn.Parameter(torch.randn(4, 8, 12))
        self.activation, self.gates = activation, gates

    def forward(self, x):
        gates, indices = self.gates(x[:, :4]).topk(2)
        return run_experts(x, gates, indices, self.layer.w_in, self.layer.w_out,
                           activation=self.activation)


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x) + self.calls


class Branching(Layer):
    def forward(self, x):
        return super().forward(x) * (2 if x.shape[0] < 100 else 1)


def complex_gates(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2))).unsqueeze(0).abs().squeeze(0).repeat(1, 2)
