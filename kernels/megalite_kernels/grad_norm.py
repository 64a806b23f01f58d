"""The sum of squares behind the gradient norm.

A plain fp32 sum over millions of elements loses digits (torch's vector_norm is off by 1e-3 at 25M elements on
CPU). So squares are summed in at least fp32 over short rows, and the sums of rows in fp64. The caller reduces
the result over ranks.
"""

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton

# elements summed in fp32: few enough for the sum to keep its digits, enough for the number of rows not to
# matter
ROW = 512


def squared_sum(chunks: list[Tensor]) -> Tensor:
    """Return Σ x² over all elements of all chunks (flat, any lengths): [] fp64 on the chunks' device.

    Does not synchronize with the host.
    """
    if chunks and takes_triton(chunks[0]):
        from megalite_kernels import grad_norm_triton

        return grad_norm_triton.squared_sum(chunks)
    device = chunks[0].device if chunks else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        whole = chunk.numel() // ROW * ROW
        for rows in (chunk[:whole].view(-1, ROW), chunk[whole:].view(1, -1)):
            if rows.numel():
                accumulate_dtype = torch.promote_types(chunk.dtype, torch.float32)
                norms = torch.linalg.vector_norm(rows, dim=-1, dtype=accumulate_dtype)
                total += norms.double().square_().sum()
    return total
