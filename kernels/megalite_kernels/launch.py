"""Launches Triton kernels and registers their host functions as torch operations. Imports no triton.

No kernel is autotuned at run time: that takes time on every rank, and could choose differently on two ranks
or in two runs. Modules launch the variants in their static tables. The compile tests record what is launched
at the sizes of real models, and check of each such binary, without a GPU, that it spills no registers and
loads 128 bits at once.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
"""The architectures of the tables of variants: A100, H100 and H200, B200, MI300."""
FP8_ARCHITECTURES = ("sm_89", "sm_90", "sm_100", "sm_120")
"""Those of the matmuls in fp8, whose tensor cores multiply e4m3: L40S and RTX 40, H100 and H200, B200, RTX
50. MI300 is not among them: its 8-bit format (e4m3fnuz) has other exponents."""


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the entry of `ARCHITECTURES` that matches a device best.

    A CPU, where kernels are interpreted, has sm_90.
    """
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(torch.cuda.get_device_capability(device)[0], "sm_80")


@functools.cache
def fp8_architecture(device: torch.device) -> str:
    """Return the entry of `FP8_ARCHITECTURES` that a device has; an empty string: none.

    A CPU, where kernels are interpreted, has sm_90.
    """
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if major == 8:
        return "sm_89" if minor == 9 else ""
    return {9: "sm_90", 10: "sm_100", 12: "sm_120"}.get(major, "")


def upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a table of the host on the device of a kernel.

    The host does not wait for work that the device does before the copy.
    """
    if device == table.device or device.type == "meta":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel and the properties that determine its machine code.

    The types of its arguments, and which of them are multiples of 16, determine it too.
    """

    kernel: Any
    """The function decorated with triton.jit."""
    constants: Mapping[str, Any]
    """The kernel's tl.constexpr arguments."""
    warps: int
    stages: int = 1
    """Number of iterations of a loop over loads that the compiler overlaps."""

    @property
    def options(self) -> dict[str, Any]:
        """Compile options.

        Newer versions of Triton contract to fused multiply-add only with `enable_fp_fusion`.
        """
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def launch(self, grid: tuple[int, ...], *args: Any) -> None:
        """Run `grid` programs on the current device.

        `args` are the kernel's arguments in order, without the constants.
        """
        self.kernel[grid](*args, **self.constants, **self.options)


def operation(
    fake: Callable[..., Any] | None = None, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that registers a host function as `torch.ops.megalite.<its name>`.

    So torch.compile can trace over it, and selective activation checkpointing can recognize it. In eager mode
    a call costs no more than the function itself: the registered operation is used only by a compiler or
    under a dispatch mode. It has no gradient: the caller's autograd Function computes it. Results must be new
    tensors, never views of arguments.

    Args:
        fake: takes the same arguments and returns tensors with the shapes, dtypes and strides of the result,
            without computing; None: the operation returns nothing.
        mutates: names of the tensor arguments that it writes to.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        registered = torch.library.custom_op(f"megalite::{function.__name__}", function, mutates_args=mutates)
        if fake is not None:
            registered.register_fake(fake)

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
                return registered(*args, **options)
            return function(*args, **options)

        return call

    return register
