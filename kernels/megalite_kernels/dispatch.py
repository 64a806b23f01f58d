"""Which tensors an operation's Triton kernel takes; all others go through its plain-torch reference.

The choice is made once for the whole process (`train.kernels`). Until then every tensor takes the reference, and so does fp64, which is
for proof. Triton itself is imported by the first tensor that wants it: that takes a second, and a machine without a GPU may not have it.
"""

import importlib.util
import os

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_device_types: tuple[str, ...] = ()  # whose tensors the kernels take


def select(kernels: str) -> None:
    """Choose for this process.

    Args:
        kernels: auto (CUDA tensors, where Triton is installed), torch (none), or triton (CUDA tensors, and CPU tensors too where
            TRITON_INTERPRET=1 makes Triton interpret kernels instead of compiling them, which is slow and for tests).

    Raises:
        ValueError: for triton, where no kernel can run.
    """
    global _device_types
    installed = importlib.util.find_spec("triton") is not None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kernels == "triton" and not (installed and (interpreted or torch.cuda.is_available())):
        missing = "a GPU, or TRITON_INTERPRET=1" if installed else "the package triton"
        raise ValueError(f"train.kernels = triton needs {missing}. Set it to auto or torch.")
    taken = {"auto": ("cuda",), "triton": ("cuda", "cpu") if interpreted else ("cuda",), "torch": ()}
    _device_types = taken[kernels] if installed else ()


def takes_triton(x: Tensor) -> bool:
    """Whether the operation on this tensor runs its kernel."""
    return x.device.type in _device_types and x.dtype in _DTYPES
