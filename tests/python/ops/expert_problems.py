"""A layer of experts with everything a form can have, and what it computes in float64."""

import torch

from moe_mlir.experts import ExpertActivation, run_experts

E, K = 5, 2
SWIGLU = ExpertActivation("silu", gate="concatenated")
FORMS = {
    "none": ExpertActivation(),
    "relu": ExpertActivation("relu"),
    "relu2": ExpertActivation("relu2"),
    "gelu": ExpertActivation("gelu"),
    "gelu_tanh gate": ExpertActivation("gelu_tanh", gate="concatenated"),
    "swiglu": SWIGLU,
    "gpt-oss": ExpertActivation("silu", 1.702, "interleaved", limit=1.0, up_offset=1.0),
    "clamp_activated": ExpertActivation("silu", gate="concatenated", bound="clamp_activated",
                                        limit=0.6, up_limit=0.8),
    "softcap": ExpertActivation("silu", gate="interleaved", bound="softcap", limit=0.7,
                                up_limit=0.9),
}


def problem(width, hidden, act=SWIGLU, *, tokens=9, k=K, transposed=False, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)
    features = hidden if act.gate == "none" else 2 * hidden
    w_in, w_out = normal(E, features, width) / width**0.5, normal(E, width, hidden) / hidden**0.5
    if transposed:
        w_in, w_out = w_in.mT.contiguous(), w_out.mT.contiguous()
    # Expert 3 is idle; -1 and E are no experts.
    indices = torch.randint(0, E, (tokens, k), generator=generator)
    indices[indices == 3] = E
    indices[::4, 0] = -1
    biases = [normal(E, features), normal(E, width)] if bias else [None, None]
    return normal(tokens, width), normal(tokens, k), indices, w_in, w_out, *biases


def call(values, act, transposed=False, function=run_experts):
    x, gates, indices, w_in, w_out, b_in, b_out = values
    return function(x, gates, indices, w_in, w_out, b_in=b_in, b_out=b_out, activation=act,
                    transposed=transposed)


def judge(x, gates, indices, w_in, w_out, *, b_in, b_out, activation, transposed):
    """Token by token, in float64."""
    if transposed:
        w_in, w_out = w_in.mT, w_out.mT
    y = []
    for t in range(x.shape[0]):
        total = x.new_zeros(w_out.shape[1])
        for gate, e in zip(gates[t], indices[t].tolist(), strict=True):
            if 0 <= e < E:
                z = w_in[e] @ x[t] + (0 if b_in is None else b_in[e])
                total = total + gate * (w_out[e] @ activation(z) + (0 if b_out is None else b_out[e]))
        y.append(total)
    return torch.stack(y) if y else x.new_zeros(0, w_out.shape[1])


def rounded(values, dtype):
    return [x if x is None or not x.is_floating_point() else x.to(dtype) for x in values]


def wide(values):
    return [x if x is None or not x.is_floating_point() else x.double() for x in values]
