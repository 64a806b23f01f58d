"""Chooses between an operation's Triton kernel and its plain-torch reference.

The choice is made once for the whole process (`train.kernels`). Before that all tensors use the reference,
and fp64 always does. Triton is imported with the first tensor that needs it: the import takes a second, and a
machine without a GPU may not have the package.
"""

import importlib.util
import os

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
selected = ""  # train.kernels, once it is known
_on_cuda = _on_cpu = False  # whether kernels compute the tensors of these devices


def select(kernels: str) -> None:
    """Select the kernels of this process.

    Args:
        kernels: auto (Triton for CUDA tensors if it is installed), torch (no Triton), or triton (for CUDA
            tensors; also for CPU tensors if TRITON_INTERPRET=1 makes Triton interpret kernels instead of
            compiling them, which is slow and meant for tests).

    Raises:
        ValueError: triton is selected, but no kernel can run.
    """
    global selected, _on_cuda, _on_cpu
    installed = importlib.util.find_spec("triton") is not None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kernels == "triton" and not (installed and (interpreted or torch.cuda.is_available())):
        missing = "a GPU, or TRITON_INTERPRET=1" if installed else "the package triton"
        raise ValueError(f"train.kernels=triton requires {missing}. Set train.kernels to auto or torch.")
    selected = kernels
    _on_cuda = installed and kernels != "torch"
    _on_cpu = installed and kernels == "triton" and interpreted


def runs_triton(x: Tensor) -> bool:
    """Return whether Triton kernels run on the device of a tensor."""
    return _on_cuda and x.is_cuda or _on_cpu and x.is_cpu


def takes_triton(x: Tensor) -> bool:
    """Return whether an operation on this tensor runs its Triton kernel."""
    return runs_triton(x) and x.dtype in _DTYPES
