"""Recurrences and convolutions of installed packages, as routes of `recurrence` and `causal_conv` on a GPU.

    fla              flash-linear-attention: the gated delta rule (`delta`), with a decay for each channel
                     (`channel`), and a scan without a delta rule (`scan`), which is Mamba-2's
    causal_conv1d    the package of this name: `convolution`

A route runs only where the device's file names it (`device_routes`), and where it supports the call; else the
Triton kernels run. The packages differentiate by autograd: their forward runs once more in backward, as
states are computed again here. The order of their additions is not known, so a deterministic run does not
use them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite_kernels.device_routes import measured

if TYPE_CHECKING:
    from megalite_kernels.causal_conv import ConvGradients
    from megalite_kernels.recurrence import Gradients, Tokens

HALF = (torch.float16, torch.bfloat16)
WIDEST = 256  # channels of a key or a value
TAPS = (2, 3, 4)
FLA = {
    "delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "channel": ("fla.ops.kda", "chunk_kda"),
    "scan": ("fla.ops.simple_gla", "chunk_simple_gla"),
}
"""Kind of recurrence → module and function of fla."""
ROUTES = {**dict.fromkeys(FLA, ("triton", "fla")), "convolution": ("triton", "causal_conv1d")}
"""Kind → its routes, in default order."""


@functools.cache
def _missing(package: str) -> str | None:
    return None if importlib.util.find_spec(package) is not None else f"{package} is not installed"


def _refusal(checks: Sequence[tuple[bool, str]], package: str) -> str | None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    for supported, reason in (*checks, (not deterministic, "run.deterministic")):
        if not supported:
            return reason
    return _missing(package)


# ---- recurrences


def kind_of(tokens: Tokens) -> str:
    """Return the kind of a recurrence."""
    if tokens.beta is None:
        return "scan"
    return "delta" if tokens.g.ndim == 3 else "channel"


def refuses(tokens: Tokens) -> str | None:
    """Return why fla does not support a recurrence, or None if it does."""
    q, k, v = tokens[:3]
    checks = (
        (tokens.starts is None, "documents"),
        (q.dtype == k.dtype == v.dtype and v.dtype in HALF, f"{v.dtype}"),
        (max(k.shape[-1], v.shape[-1]) <= WIDEST, f"more than {WIDEST} channels of a head"),
        (tokens.beta is not None or tokens.g.ndim == 3, "a scan with a decay for each channel"),
        (v.numel() > 0, "there are no elements"),
    )
    return _refusal(checks, "fla")


def takes(tokens: Tokens) -> bool:
    """Return whether a recurrence runs in fla."""
    return getattr(measured(tokens.v.device), kind_of(tokens)) == "fla" and refuses(tokens) is None


def _recur(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [seq, batch, heads, dv], and the state after the last token."""
    kind = "scan" if beta is None else "delta" if g.ndim == 3 else "channel"
    module, name = FLA[kind]
    repeats = v.shape[2] // k.shape[2]
    if kind == "scan" and repeats > 1:
        q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    inputs = [x.transpose(0, 1).contiguous() for x in (q, k, v, g, beta) if x is not None]
    options = {"scale": 1.0, "initial_state": initial, "output_final_state": True}  # queries are scaled
    out, final = getattr(importlib.import_module(module), name)(*inputs, **options)
    return out.transpose(0, 1).contiguous(), final


def recur(tokens: Tokens, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `recurrence.forward`."""
    with torch.no_grad():
        return _recur(*tokens[:5], initial)


def recur_backward(dout: Tensor, tokens: Tokens, initial: Tensor | None, dfinal: Tensor | None) -> Gradients:
    """Return `recurrence.backward`."""
    from megalite_kernels.recurrence import Gradients

    if initial is None:
        batch, heads, dv = tokens.v.shape[1:]
        initial = tokens.v.new_zeros(batch, heads, tokens.k.shape[3], dv, dtype=torch.float32)
    given = (*tokens[:5], initial)
    grads = (dout,) if dfinal is None else (dout, dfinal)
    return Gradients(*_gradients(_recur, given, grads))


# ---- the convolution


def refuses_convolution(x: Tensor, weight: Tensor, has_halo: bool) -> str | None:
    """Return why causal_conv1d does not support a convolution, or None if it does."""
    checks = (
        (not has_halo, "tokens before the first one"),
        (x.dtype in HALF, f"{x.dtype}"),
        (weight.shape[1] in TAPS, f"{weight.shape[1]} weights of a channel"),
        (x.shape[2] % 8 == 0, f"{x.shape[2]} channels are no multiple of 8"),
        (x.numel() > 0, "there are no elements"),
    )
    return _refusal(checks, "causal_conv1d")


def takes_convolution(x: Tensor, weight: Tensor, has_halo: bool) -> bool:
    """Return whether a convolution runs in causal_conv1d."""
    is_route = measured(x.device).convolution == "causal_conv1d"
    return is_route and refuses_convolution(x, weight, has_halo) is None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool) -> Tensor:
    package = importlib.import_module("causal_conv1d")
    rows = x.contiguous().permute(1, 2, 0)  # [batch, channels, seq], channels next to each other
    documents = None
    if starts is not None:
        documents = starts.t().expand(x.shape[1], -1).to(torch.int32).contiguous()
    activation = "silu" if silu else None
    out = package.causal_conv1d_fn(rows, weight, bias, seq_idx=documents, activation=activation)
    return out.permute(2, 0, 1).contiguous()


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool) -> Tensor:
    """Return `causal_conv.forward`."""
    with torch.no_grad():
        return _convolve(x, weight.float(), None if bias is None else bias.float(), starts, silu)


def convolve_backward(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, silu: bool
) -> ConvGradients:
    """Return `causal_conv.backward`. Gradients of fp32 weights are fp32."""
    from megalite_kernels.causal_conv import ConvGradients

    given = x, weight.float(), None if bias is None else bias.float()
    convolution = functools.partial(_convolve, starts=starts, silu=silu)
    dx, dweight, dbias = _gradients(lambda *inputs: (convolution(*inputs),), given, (dout,))
    return ConvGradients(dx, dweight, dbias, x.new_zeros(weight.shape[1] - 1, *x.shape[1:]))


def _gradients(
    function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> list[Any]:
    """Return the gradients of what is given from those of the first outputs; None where nothing is given."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        outputs = function(*leaves)[: len(grads)]
    inputs = [leaf for leaf in leaves if leaf is not None]
    each_gradient = iter(
        torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    )
    return [None if leaf is None else next(each_gradient).to(leaf.dtype) for leaf in leaves]
