"""How a Triton kernel is launched, and how its host function becomes an operation of torch. Imports no triton.

No kernel is tuned at run time: that would take time on every rank, and could choose differently on two ranks or in two runs. A module
launches what stands in its static tables. The compile tests note what is launched at the sizes of real models, and prove of each such
binary, with no GPU, that it spills no register and loads 128 bits at once.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What the tables of variants are made for: A100, H100 and H200, B200, MI300."""


@functools.cache
def architecture(device: torch.device) -> str:
    """Which of `ARCHITECTURES` a device runs, or comes nearest to. The interpreter, on a CPU, stands for sm_90."""
    if device.type == "cpu":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    return {9: "sm_90", 10: "sm_100"}.get(torch.cuda.get_device_capability(device)[0], "sm_80")


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel with everything that decides its machine code, but for the types of its arguments and which of them are multiples of 16."""

    kernel: Any
    """The function decorated with triton.jit."""
    constants: Mapping[str, Any]
    """The kernel's tl.constexpr arguments."""
    warps: int
    stages: int = 1
    """How many iterations of a loop over loads the compiler overlaps."""

    @property
    def options(self) -> dict[str, Any]:
        """How it is compiled. A newer Triton does not contract to fused multiply-add unless it is told to."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def launch(self, grid: tuple[int, ...], *args: Any) -> None:
        """Run `grid` programs on the current device; `args` are the kernel's, in order, but for the constants."""
        self.kernel[grid](*args, **self.constants, **self.options)


def operation(fake: Callable[..., Any] | None = None, mutates: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: register a host function as `torch.ops.megalite.<its name>`, so that torch.compile can trace over it and selective
    checkpointing can tell it from others. Called in eager mode it costs no more than the function itself: the registered operation is
    taken only by a compiler, or under a dispatch mode. It has no gradient of its own: the caller's autograd Function has.

    Args:
        fake: takes the same arguments and returns tensors of the shapes, dtypes and strides of the result, without computing. An operation
            that returns nothing needs none.
        mutates: names of the tensor arguments that it writes to. What it returns is new: never a view of an argument.
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
