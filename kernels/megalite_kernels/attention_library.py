"""Causal attention with the kernels that come with torch, called with an explicit forward and backward.

They support neither windows, documents, soft-cap nor a dropout mask that can be recomputed; `attention.attention` uses them where none of
these is requested. `library` makes the checks that torch's dispatcher would make: it rejects heads whose channels are no multiple of 8,
which the dispatcher would pad, and shapes for which cuDNN has no backward.

Published forward and backward speeds in TFLOP/s, H100, 8k keys, 128 channels: cuDNN's 600 and 518 (FlashAttention-3, figures 5 and 6),
FlashAttention-2, which is torch's own, 370 and 318, a Triton kernel 392 forward. So cuDNN's comes first on Hopper and Blackwell,
FlashAttention-2 elsewhere. Neither sums dq in a fixed order, so a deterministic run uses neither.
"""

import torch
from torch import Tensor
from torch.backends import cuda

from megalite_kernels.launch import architecture

_aten = torch.ops.aten
_CUDNN_WIDEST = 128  # channels: for wider heads a backward exists only in some versions, which `can_use_cudnn_attention` does not check
_CUDNN_PART = 128  # other sequences than multiples of 128 keys: cuDNN before 9.15.1 reads beyond them, later ones have returned NaN for dq


def _by_head(x: Tensor) -> Tensor:
    """[S, B, heads, D] viewed as [B, heads, S, D]."""
    return x.permute(1, 2, 0, 3)


def library(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The library kernel for q, k and v [S, B, heads, D]: cudnn or flash; None if neither supports them."""
    sequence, _, heads, dim = q.shape
    if not q.is_cuda or not q.numel() or dim % 8 or torch.are_deterministic_algorithms_enabled():
        return None
    parameters = cuda.SDPAParams(_by_head(q), _by_head(k), _by_head(v), None, 0.0, True, heads != k.shape[2])
    valid = dim <= _CUDNN_WIDEST and sequence % _CUDNN_PART == 0
    if valid and architecture(q.device) in ("sm_90", "sm_100") and cuda.can_use_cudnn_attention(parameters):
        return "cudnn"
    return "flash" if cuda.can_use_flash_attention(parameters) else None


def library_attention(chosen: str, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    """out [S, B, hq, D], contiguous, and what backward needs: the log-sum-exp, and the state of a random generator, which is not used."""
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
    dout = dout.contiguous()  # torch caches cuDNN's plan by the strides of q, k and v only: those of the others must not vary
    tensors = *map(_by_head, (dout, q, k, v, out)), lse
    if chosen == "cudnn":
        backward = _aten._scaled_dot_product_cudnn_attention_backward
        found = backward(*tensors, seed, offset, None, None, None, length, length, 0.0, True, scale=scale)
    else:
        backward = _aten._scaled_dot_product_flash_attention_backward
        found = backward(*tensors, None, None, length, length, 0.0, True, seed, offset, scale=scale)
    dq, dk, dv = (x.permute(2, 0, 1, 3).contiguous() for x in found)
    return dq, dk, dv
