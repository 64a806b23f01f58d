"""A router's logits: rows · weightᵀ in at least fp32, since in 16 bits they would tie at the k-th place.

There are two routes for operands in 16 bits on a GPU. Both multiply the same numbers, exactly in fp32, and
add them in fp32:

    out_dtype   a matmul of the operands as they are, on tensor cores, which writes fp32
    cast        both are cast to fp32 first, which tensor cores do not support: the reference, and the only
                route for other operands

out_dtype runs unless a device's file names the other one (`device_routes`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megalite_kernels.device_routes import measured

_HALF = (torch.float16, torch.bfloat16)


def _out_dtype(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(rows, weight.t(), out_dtype=torch.float32)


def _cast(rows: Tensor, weight: Tensor) -> Tensor:
    accumulate_dtype = torch.promote_types(rows.dtype, torch.float32)
    return torch.mm(rows.to(accumulate_dtype), weight.to(accumulate_dtype).t())


ROUTES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"out_dtype": _out_dtype, "cast": _cast}
"""By name, in default order: (rows [n, hidden], weight [experts, hidden]) -> [n, experts]."""


def logits(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows · weightᵀ in at least fp32, computed by the route of the device.

    [n, hidden], [experts, hidden] -> [n, experts].
    """
    if not rows.is_cuda or rows.dtype not in _HALF or weight.dtype != rows.dtype:
        return _cast(rows, weight)
    return ROUTES[measured(rows.device).router or "out_dtype"](rows, weight)
