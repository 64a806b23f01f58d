"""Activations of the feed-forward block, gated and plain.

    plain:  h = act(x)               dx = dh · act'(x)
    gated:  h = act(gate) · up       dgate = dh · up · act'(gate)       dup = dh · act(gate)

`gate_up` is packed [..., 2F], gate first, as one matmul writes it; its gradient is packed the same way.
Backward needs only the input: it recomputes h and returns it, too, for the weight gradient of the matmul that
reads h. That costs one multiplication; keeping h would add a third to the block's activations.
act is silu (x · sigmoid(x)), gelu (x · Φ(x)), gelu_new, gelu_fast or gelu_pytorch_tanh (all the tanh form of
gelu), relu, or relu2 (relu(x)²). clamped_swiglu, of gpt-oss, has a gated form of its own, with a = 1.702 and
c = 7:

    g = min(gate, c)        u = max(min(up, c), −c)        h = g · sigmoid(a · g) · (u + 1)
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.backend import takes_triton

_aten = torch.ops.aten


class _Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]  # (dh, x, grad_input=out) -> out


def _relu2(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


def _relu2_backward(dh: Tensor, x: Tensor, *, grad_input: Tensor) -> Tensor:
    """Return 2 · relu(x) · dh, the gradient of relu(x)²."""
    return torch.mul(torch.relu(x).mul_(2), dh, out=grad_input)


_GELU_TANH = _Activation(
    partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward.grad_input, approximate="tanh")
)
_ACTIVATIONS = {
    "silu": _Activation(F.silu, _aten.silu_backward.grad_input),
    "gelu": _Activation(F.gelu, _aten.gelu_backward.grad_input),
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": _Activation(torch.relu, partial(_aten.threshold_backward.grad_input, threshold=0)),
    "relu2": _Activation(_relu2, _relu2_backward),
}
CLAMPED, _GAIN, _LIMIT = "clamped_swiglu", 1.702, 7.0
# activations whose gated form has a Triton kernel
_FUSED = ("silu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def _lookup(act: str) -> _Activation:
    if act not in _ACTIVATIONS:
        raise ValueError(f"Unknown activation {act!r}. Supported activations: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[act]


def plain_forward(x: Tensor, act: str) -> Tensor:
    """Return act(x), with the same shape and dtype."""
    return _lookup(act).forward(x)


def plain_backward(dh: Tensor, x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of `plain_forward` with respect to x, and h."""
    function = _lookup(act)
    return function.backward(dh, x, grad_input=torch.empty_like(x)), function.forward(x)


def gated_forward(gate_up: Tensor, act: str) -> Tensor:
    """Return act(gate) · up: [..., 2F] -> [..., F]."""
    if act in _FUSED and takes_triton(gate_up):
        from megalite_kernels import activation_triton

        return activation_triton.gated_forward(gate_up, act)
    gate, up = gate_up.chunk(2, dim=-1)
    if act == CLAMPED:
        gate = gate.clamp(max=_LIMIT)
        return gate.mul(torch.sigmoid(_GAIN * gate)).mul_(up.clamp(-_LIMIT, _LIMIT).add_(1))
    return _lookup(act).forward(gate).mul_(up)


def gated_backward(dh: Tensor, gate_up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Return the gradient of `gated_forward` with respect to gate_up, and h.

    dh [..., F] -> [..., 2F], [..., F].
    """
    if act in _FUSED and takes_triton(gate_up):
        from megalite_kernels import activation_triton

        return activation_triton.gated_backward(dh, gate_up, act)
    if act == CLAMPED:
        return _clamped_backward(dh, gate_up)
    function = _lookup(act)
    gate, up = gate_up.chunk(2, dim=-1)
    dgate_up = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    activated = function.forward(gate)
    torch.mul(dh, activated, out=dup)
    function.backward(dh * up, gate, grad_input=dgate)
    return dgate_up, activated.mul_(up)


def _clamped_backward(dh: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the backward of clamped_swiglu: clamped values have no gradient."""
    gate, up = gate_up.chunk(2, dim=-1)
    g, u = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT).add_(1)
    sigmoid = torch.sigmoid(_GAIN * g)
    activated = g * sigmoid
    slope = sigmoid * (1 + _GAIN * g * (1 - sigmoid))
    dgate = (dh * u * slope).masked_fill_(gate > _LIMIT, 0)
    dup = (dh * activated).masked_fill_(up.abs() > _LIMIT, 0)
    return torch.cat((dgate, dup), dim=-1), activated.mul_(u)
