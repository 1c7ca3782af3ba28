"""What an expert's layer ends with: the options of `grouped_linear`, in torch (docs/Spec.md 3.14)."""

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._check import Checker
from ._kernel import enum, f64

ACTIVATIONS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu")
GATES = ("none", "concatenated", "interleaved")
BOUNDS = ("clamp", "clamp_activated", "softcap")
# Gated linear units by the names of https://arxiv.org/abs/2002.05202, and the activation of each.
GLUS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}

# The arguments of an op that takes an ExpertActivation, in the order of its fields.
SCHEMA = ('str activation="none", float alpha=1.0, str gate="none", str bound="clamp", '
          "float? limit=None, float? up_limit=None, float up_offset=0.0")


@dataclass(frozen=True)
class ExpertActivation:
    """y = act(z); with a gate, y = act(a) u of the two halves of z's features, bounded.

    Called on z `[.., f]`, it is the meaning in plain torch, differentiable by autograd.

    Args:
        activation: "none", "relu", "relu2" (the square of relu), "gelu" (of erf), "gelu_tanh" or
            "silu".
        alpha: silu is x sigmoid(alpha x).
        gate: "none"; "concatenated", a is the first half of the features and u the second; or
            "interleaved", a is the even features and u the odd ones.
        bound: with a gate and a `limit`: "clamp", a is at most `limit`, u within +-`up_limit`;
            "clamp_activated", act(a) is at most `limit`; "softcap", limit tanh(x / limit) of both.
        limit, up_limit: None: no limit; of u, that of a.
        up_offset: added to u behind its limit; 1 in gpt-oss.

    >>> swiglu = ExpertActivation.named("swiglu")
    >>> swiglu(torch.tensor([1.0, 2.0, 3.0, 4.0]))          # silu(1) * 3, silu(2) * 4
    tensor([2.1932, 7.0464])
    """

    activation: str = "none"
    alpha: float = 1.0
    gate: str = "none"
    bound: str = "clamp"
    limit: float | None = None
    up_limit: float | None = None
    up_offset: float = 0.0

    @classmethod
    def named(cls, name: str) -> "ExpertActivation":
        """By its name: one of `ACTIVATIONS` without a gate, or of `GLUS` with a concatenated one.

        >>> ExpertActivation.named("swiglu") == ExpertActivation("silu", gate="concatenated")
        True
        """
        Checker("ExpertActivation").choice("activation", name, (*ACTIVATIONS, *GLUS))
        return cls(GLUS[name], gate="concatenated") if name in GLUS else cls(name)

    @classmethod
    def of(cls, arguments: Any) -> "ExpertActivation":
        """Of the arguments of an op that takes one, by their names."""
        return cls(*(getattr(arguments, name) for name in cls.__dataclass_fields__))

    @property
    def options(self) -> tuple[Any, ...]:
        """The arguments of an op that takes one, in its order; `astuple` takes microseconds."""
        return (self.activation, self.alpha, self.gate, self.bound, self.limit, self.up_limit,
                self.up_offset)

    @property
    def is_identity(self) -> bool:
        return self.activation == "none" and self.gate == "none"

    def width(self, features: int) -> int:
        """How many features y has of those of z."""
        return features if self.gate == "none" else features // 2

    def validate(self, check: Checker, features: int) -> None:
        check.choice("activation", self.activation, ACTIVATIONS)
        check.choice("gate", self.gate, GATES)
        check.choice("bound", self.bound, BOUNDS)
        for name in ("alpha", "limit", "up_limit"):
            if getattr(self, name) is not None:
                check.positive(name, getattr(self, name))
        check.finite("up_offset", self.up_offset)
        if self.gate == "none":
            if (self.bound, self.limit, self.up_limit, self.up_offset) != ("clamp", None, None, 0):
                check.fail("expected 'bound', 'limit', 'up_limit' and 'up_offset' only with a "
                           "'gate', found gate 'none'")
        elif features % 2:
            check.fail(f"expected an even number of features with a 'gate', found {features}")
        if self.activation != "silu" and (self.alpha != 1.0 or self.bound == "softcap"):
            check.fail("expected 'alpha' and bound 'softcap' only with activation 'silu', found "
                       f"{self.activation!r}")
        if self.bound != "clamp" and self.limit is None:
            check.fail(f"expected a 'limit' with bound {self.bound!r}, found None")

    def attributes(self) -> tuple[tuple[str, str], ...]:
        """The attributes of moe.grouped_linear that say the same."""
        written = [("activation", enum("activation", self.activation)), ("alpha", f64(self.alpha))]
        if self.gate != "none":
            written += [("gate", enum("gate", self.gate)), ("bound", enum("bound", self.bound)),
                        ("up_offset", f64(self.up_offset))]
            written += [(name, f64(getattr(self, name))) for name in ("limit", "up_limit")
                        if getattr(self, name) is not None]
        return tuple(written)

    # ---- in torch ----------------------------------------------------------------

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        if self.gate == "none":
            return self._act(z)
        a, u = self._halves(z)
        return self._gated(a) * self._factor(u)

    def gradient(self, z: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """dz of dy, without autograd: what the kernel of a backward op may call."""
        if self.gate == "none":
            return dy * self._slope(z)
        a, u = self._halves(z)
        da = dy * self._factor(u) * self._gated_slope(a)
        du = dy * self._gated(a) * self._factor_slope(u)
        if self.gate == "concatenated":
            return torch.cat([da, du], dim=-1)
        return torch.stack([da, du], dim=-1).flatten(-2)

    def _halves(self, z):
        if self.gate == "concatenated":
            return z.chunk(2, dim=-1)
        return z[..., ::2], z[..., 1::2]

    def _act(self, x):
        if self.activation == "silu":
            # torch's own where it is the same: one pass instead of three.
            return torch.nn.functional.silu(x) if self.alpha == 1.0 else \
                x * torch.sigmoid(self.alpha * x)
        return _FUNCTIONS[self.activation][0](x)

    def _slope(self, x):
        if self.activation == "silu":
            s = torch.sigmoid(self.alpha * x)
            return s * (1 + self.alpha * x * (1 - s))
        return _FUNCTIONS[self.activation][1](x)

    def _gated(self, a):
        if self.limit is None:
            return self._act(a)
        if self.bound == "clamp":
            return self._act(a.clamp(max=self.limit))
        if self.bound == "clamp_activated":
            return self._act(a).clamp(max=self.limit)
        return _softcap(a, self.limit) * torch.sigmoid(self.alpha * a)

    def _gated_slope(self, a):
        if self.limit is None:
            return self._slope(a)
        # A NaN passes a clamp, and its gradient with it.
        if self.bound == "clamp":
            return torch.where(a > self.limit, 0.0, self._slope(a.clamp(max=self.limit)))
        if self.bound == "clamp_activated":
            return torch.where(self._act(a) > self.limit, 0.0, self._slope(a))
        s = torch.sigmoid(self.alpha * a)
        return s * (_softcap_slope(a, self.limit)
                    + _softcap(a, self.limit) * self.alpha * (1 - s))

    @property
    def _limit_of_factor(self):
        return self.limit if self.up_limit is None else self.up_limit

    def _factor(self, u):
        limit = self._limit_of_factor
        if limit is not None:
            u = _softcap(u, limit) if self.bound == "softcap" else u.clamp(-limit, limit)
        return u + self.up_offset if self.up_offset else u

    def _factor_slope(self, u):
        limit = self._limit_of_factor
        if limit is None:
            return torch.ones_like(u)
        if self.bound == "softcap":
            return _softcap_slope(u, limit)
        return torch.where(u.abs() > limit, 0.0, 1.0).to(u.dtype)


def _softcap(x, limit):
    return limit * torch.tanh(x / limit)


def _softcap_slope(x, limit):
    return 1 - torch.tanh(x / limit).square()


def _gelu_slope(x):
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density


def _gelu_tanh_slope(x):
    scale = math.sqrt(2 / math.pi)
    t = torch.tanh(scale * (x + 0.044715 * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)


# activation -> (function, slope); silu has a parameter.
_FUNCTIONS = {
    "none": (lambda x: x, torch.ones_like),
    "relu": (torch.relu, lambda x: (x > 0).to(x.dtype)),
    "relu2": (lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)),
    "gelu": (torch.nn.functional.gelu, _gelu_slope),
    "gelu_tanh": (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), _gelu_tanh_slope),
}


# ---- recognition ----------------------------------------------------------------


def recognize(function: Callable | str | None) -> ExpertActivation | None:
    """The activation that a function of torch, or a name, is; None for a function not known."""
    if isinstance(function, ExpertActivation):
        return function
    if isinstance(function, str):
        return ExpertActivation.named(function)
    if isinstance(function, torch.nn.GELU):
        return _GELUS[function.approximate]
    name = _TORCH_MODULES.get(type(function))
    if isinstance(function, types.BuiltinFunctionType | types.FunctionType):
        name = _TORCH_FUNCTIONS.get(function)
    return ExpertActivation(name) if name else None


_TORCH_FUNCTIONS: dict[Any, str] = {
    torch.nn.functional.gelu: "gelu", torch.nn.functional.silu: "silu",
    torch.nn.functional.relu: "relu", torch.relu: "relu",
}
_TORCH_MODULES: dict[type, str] = {
    torch.nn.SiLU: "silu", torch.nn.ReLU: "relu", torch.nn.Identity: "none",
}
_GELUS = {"none": ExpertActivation("gelu"), "tanh": ExpertActivation("gelu_tanh")}
