"""Depthwise causal convolution over a sequence, and SiLU of its output.

Each channel has K weights, the last for the token itself:

    y[t] = act(bias + Σⱼ weight[j] · x[t − K + 1 + j])

A token of an earlier document reads as zero. The K − 1 tokens before the first one are the halo, which
another part of the sequence, or the past of a row in generation, provides; without it they are zero, too.
Computed in at least fp32. No communication.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import state_library
from megalite_kernels.backend import takes_triton

_WIDEST = 4


class Halo(NamedTuple):
    """The K − 1 tokens before the first one.

    Attributes:
        x: [K − 1, batch, channels]; zero where a row has no such token.
        starts: [K − 1, batch] or [K − 1, 1], where the document of each of them starts, as in `forward`;
            None: they belong to the document of the first token.
    """

    x: Tensor
    starts: Tensor | None = None


class ConvGradients(NamedTuple):
    """The gradients of x, the weight and the bias in at least fp32, and the halo's tokens."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    halo: Tensor


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    halo: Halo | None = None,
    silu: bool = True,
) -> Tensor:
    """Return the outputs, [seq, batch, channels].

    Args:
        weight: [channels, K].
        starts: [seq, batch] or [seq, 1], a number for each token that its document has alone; None: all
            tokens are of one document.
    """
    if state_library.takes_convolution(x, weight, halo is not None):
        return state_library.convolve(x, weight, bias, starts, silu)
    if _takes_weights(x, weight):
        from megalite_kernels import causal_conv_triton

        return causal_conv_triton.causal_conv_forward(x, weight, bias, starts, *_parts(halo), silu)
    out = _linear(_taps(x, weight.shape[1], starts, halo), weight, bias)
    return (F.silu(out) if silu else out).to(x.dtype)


def backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    halo: Halo | None = None,
    silu: bool = True,
) -> ConvGradients:
    """Return the gradients from that of the output; the output is computed again for SiLU."""
    if state_library.takes_convolution(x, weight, halo is not None):
        return state_library.convolve_backward(dout, x, weight, bias, starts, silu)
    if _takes_weights(x, weight):
        from megalite_kernels import causal_conv_triton

        gradients = ConvGradients(
            *causal_conv_triton.causal_conv_backward(dout, x, weight, bias, starts, *_parts(halo), silu)
        )
        return gradients if bias is not None else gradients._replace(bias=None)
    taps = _taps(x, weight.shape[1], starts, halo)
    grad = dout.to(taps.dtype)
    if silu:
        out = _linear(taps, weight, bias)
        sigmoid = torch.sigmoid(out)
        grad = grad * sigmoid * (1 + out * (1 - sigmoid))
    seq, width = len(x), weight.shape[1]
    dweight = (grad * taps).flatten(1, 2).sum(1).t()  # [channels, K]
    dtaps = grad * weight.to(grad.dtype).t()[:, None, None]  # [K, seq, batch, channels]
    visible = _visible(x, width, starts, halo)
    if visible is not None:
        dtaps = dtaps * visible
    dpadded = grad.new_zeros(seq + width - 1, *x.shape[1:])
    for tap in range(width):
        dpadded[tap : tap + seq] += dtaps[tap]
    summed = None if bias is None else grad.flatten(0, 1).sum(0)
    return ConvGradients(dpadded[width - 1 :].to(x.dtype), dweight, summed, dpadded[: width - 1].to(x.dtype))


def _takes_weights(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels take the convolution: they have up to `_WIDEST` weights of a channel."""
    return takes_triton(x) and weight.shape[1] <= _WIDEST and len(x) > 0


def _parts(halo: Halo | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if halo is None else (halo.x, halo.starts)


def _linear(taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = (taps * weight.to(taps.dtype).t()[:, None, None]).sum(0)
    return out if bias is None else out + bias.to(taps.dtype)


def _taps(x: Tensor, width: int, starts: Tensor | None, halo: Halo | None) -> Tensor:
    """Return what each weight is multiplied by, [K, seq, batch, channels]."""
    before = x.new_zeros(width - 1, *x.shape[1:]) if halo is None else halo.x
    padded = torch.cat((before, x)).to(torch.promote_types(x.dtype, torch.float32))
    taps = torch.stack([padded[tap : tap + len(x)] for tap in range(width)])
    visible = _visible(x, width, starts, halo)
    # not a product: what is not visible may be anything
    return taps if visible is None else taps.masked_fill(~visible, 0)


def _visible(x: Tensor, width: int, starts: Tensor | None, halo: Halo | None) -> Tensor | None:
    """Return which taps are of the token's document, [K, seq, batch or 1, 1]; None: all."""
    if starts is None:
        return None
    before = starts[:1].expand(width - 1, -1) if halo is None or halo.starts is None else halo.starts
    padded = torch.cat((before, starts))
    return torch.stack([padded[tap : tap + len(x)] == starts for tap in range(width)]).unsqueeze(-1)
