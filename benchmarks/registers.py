"""What the compiler made of the Triton kernels that this process has launched: registers, spills, shared
memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def launched() -> list[dict[str, Any]]:
    """A row for each compiled kernel of `megalite_kernels`; none where kernels are interpreted."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megalite_kernels.") and name.endswith("_triton")
    ]
    return [made for module in modules for function in vars(module).values() for made in _compiled(function)]


def _compiled(function: Any) -> Iterator[dict[str, Any]]:
    """The binaries of one function, in the layout of Triton 3.6 and 3.7: device → (compiled kernels by key,
    …)."""
    for caches in getattr(function, "device_caches", {}).values():
        for kernel in caches[0].values():
            if getattr(kernel, "n_regs", None) is not None:  # it was loaded, so it ran
                facts = {
                    "registers": kernel.n_regs,
                    "spills": kernel.n_spills,
                    "shared": kernel.metadata.shared,
                }
                yield {"name": function.__name__, "warps": kernel.metadata.num_warps, **facts}
