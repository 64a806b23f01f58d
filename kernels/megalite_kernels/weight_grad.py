"""A weight's gradient on a GPU: grad (+)= left · inputs, with grad in fp32 and the operands in 16 bits.

Both routes add the matmul's fp32 accumulators to grad without rounding them first:

    addmm    the matmul adds
    mm_add   the matmul writes a temporary in fp32, which is then added: moves 12 bytes an element more, but
             lets cuBLAS choose among more kernels

addmm runs unless a device's file names the other one (`device_routes`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megalite_kernels.device_routes import measured


def _addmm(grad: Tensor, left: Tensor, inputs: Tensor, overwrite: bool) -> None:
    torch.addmm(grad, left, inputs, out_dtype=grad.dtype, beta=0 if overwrite else 1, out=grad)


def _mm_add(grad: Tensor, left: Tensor, inputs: Tensor, overwrite: bool) -> None:
    if overwrite:
        torch.mm(left, inputs, out_dtype=grad.dtype, out=grad)
    else:
        grad.add_(torch.mm(left, inputs, out_dtype=grad.dtype))


ROUTES: dict[str, Callable[[Tensor, Tensor, Tensor, bool], None]] = {"addmm": _addmm, "mm_add": _mm_add}
"""By name, in default order. Each takes grad [out, in], left [out, tokens], inputs [tokens, in], and whether
grad is overwritten."""


def add_matmul(grad: Tensor, left: Tensor, inputs: Tensor, overwrite: bool) -> None:
    """Compute grad (+)= left · inputs by the route of the device."""
    ROUTES[measured(grad.device).weight_grad or "addmm"](grad, left, inputs, overwrite)
