"""The weight gradients of experts, whose rows are consecutive.

    grad[e] (+)= grad_output[rows of e]ᵀ · inputs[rows of e]

Matmuls accumulate in fp32 and are added to an fp32 gradient without being rounded first. An expert without
rows contributes zero.
"""

import torch
from torch import Tensor

from megalite_kernels.backend import takes_triton
from megalite_kernels.groups import Groups

_DTYPES = (torch.float16, torch.bfloat16)


def add_grouped_gradient(
    grad: Tensor, grad_output: Tensor, inputs: Tensor, groups: Groups, overwrite: bool
) -> None:
    """Add the experts' gradients to grad [experts, out, in], or overwrite it.

    Args:
        grad_output, inputs: [n, out] and [n, in], sorted by expert.
        groups: the rows of each expert.
    """
    supported = grad.dtype == torch.float32 and inputs.dtype in _DTYPES and grad.is_contiguous()
    if supported and takes_triton(inputs):
        from megalite_kernels import grouped_weight_grad_triton as kernel

        return kernel.add_grouped_gradient(grad, grad_output, inputs, groups.ends, overwrite)
    if overwrite:  # also the experts without rows: their gradients are sent like the others
        grad.zero_()
    for own, left, right in zip(grad, groups.split(grad_output), groups.split(inputs), strict=True):
        if left.dtype == grad.dtype:
            own.addmm_(left.t(), right)
        elif left.is_cuda:  # accumulated in fp32 without being rounded first
            torch.addmm(own, left.t(), right, out_dtype=grad.dtype, out=own)
        else:
            own.add_(left.t() @ right)
