"""The sum of several ranks' parts in rank order, for the reduction of gradients in 16 bits.

Each part is cast to fp32 and added to the sum of those before it. So the sum is the same on every rank that
computes it, and is not rounded between ranks, as in NCCL's own reduction in 16 bits.
"""

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton


def ordered_sum(parts: Tensor, total: Tensor) -> None:
    """Write Σ parts[i], in order of i and in at least fp32, to total: [ranks, n] -> [n].

    Both are contiguous.
    """
    if takes_triton(parts) and takes_triton(total):
        from megalite_kernels import ordered_sum_triton

        return ordered_sum_triton.ordered_sum(parts, total)
    accumulate_dtype = torch.promote_types(parts.dtype, torch.float32)
    accumulated = parts[0].to(accumulate_dtype, copy=True)
    for part in parts[1:]:
        accumulated += part.to(accumulate_dtype)
    total.copy_(accumulated)
