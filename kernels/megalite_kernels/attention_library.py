"""Causal attention by the kernels that come with torch, called with an explicit forward and backward.

They know neither windows nor documents, soft-cap or a dropout mask that can be drawn again; `attention.attention` takes them where none of
these is asked for. What torch's dispatcher does around them is for `library` to do: heads that are no multiple of 8 channels, which it
would pad, go elsewhere, and so does what cuDNN could not go back through.

Published forward and backward speeds in TFLOP/s, H100, 8k keys, 128 channels: cuDNN's 600 and 518 (FlashAttention-3, figures 5 and 6),
FlashAttention-2, which is torch's own, 370 and 318, a Triton kernel 392 forward. So cuDNN's comes first on Hopper and Blackwell,
FlashAttention-2 elsewhere. Neither adds up dq in a fixed order, so a deterministic run takes neither.
"""

import torch
from torch import Tensor
from torch.backends import cuda, cudnn

from megalite_kernels.launch import architecture

_aten = torch.ops.aten
_CUDNN_WIDEST = 128  # channels: beyond, which widths have a backward pass depends on the version, and is not asked of a forward pass
_CUDNN_PART, _CUDNN_ANY = 128, 91501  # keys: of which the sequence is a multiple, or the version (9.15.1) is at least this


def _by_head(x: Tensor) -> Tensor:
    """[S, B, heads, D] seen as [B, heads, S, D]."""
    return x.permute(1, 2, 0, 3)


def library(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Which one takes these [S, B, heads, D], cudnn or flash; None where neither does."""
    sequence, _, heads, dim = q.shape
    if not q.is_cuda or not q.numel() or dim % 8 or torch.are_deterministic_algorithms_enabled():
        return None
    parameters = cuda.SDPAParams(_by_head(q), _by_head(k), _by_head(v), None, 0.0, True, heads != k.shape[2])
    valid = dim <= _CUDNN_WIDEST and (sequence % _CUDNN_PART == 0 or (cudnn.version() or 0) >= _CUDNN_ANY)
    if valid and architecture(q.device) in ("sm_90", "sm_100") and cuda.can_use_cudnn_attention(parameters):
        return "cudnn"
    return "flash" if cuda.can_use_flash_attention(parameters) else None


def library_attention(chosen: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """out [S, B, hq, D], contiguous, and what backward needs: the log-sum-exp, and a random state that nothing was drawn from."""
    if chosen == "cudnn":
        found = _aten._scaled_dot_product_cudnn_attention(*map(_by_head, (q, k, v)), None, True, 0.0, True, False, scale=scale)
    else:
        found = _aten._scaled_dot_product_flash_attention(*map(_by_head, (q, k, v)), 0.0, True, False, scale=scale)
    out, lse, _, _, _, _, seed, offset, _ = found
    return out.permute(2, 0, 1, 3).contiguous(), (lse, seed, offset)


def library_attention_backward(
    chosen: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous."""
    (lse, seed, offset), length = saved, q.shape[0]
    dout = dout.contiguous()  # torch finds cuDNN's plan by the strides of q, k and v alone: those of the others must always be the same
    tensors = *map(_by_head, (dout, q, k, v, out)), lse
    if chosen == "cudnn":
        backward = _aten._scaled_dot_product_cudnn_attention_backward
        found = backward(*tensors, seed, offset, None, None, None, length, length, 0.0, True, scale=scale)
    else:
        backward = _aten._scaled_dot_product_flash_attention_backward
        found = backward(*tensors, None, None, length, length, 0.0, True, seed, offset, scale=scale)
    dq, dk, dv = (x.permute(2, 0, 1, 3).contiguous() for x in found)
    return dq, dk, dv
