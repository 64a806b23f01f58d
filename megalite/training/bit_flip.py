"""Flips one bit in the result of a matmul of a rank, as a faulty device may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.errors import ConfigError
from megalite.system import rng

MATMULS = ("mm", "addmm", "addmm_")
"""torch's operations that count: matmuls of two matrices."""
HIGHEST_BIT = {torch.float64: 51, torch.float32: 22, torch.float16: 9, torch.bfloat16: 6}
"""The highest bit of the mantissa."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class BitFlip(TorchDispatchMode):
    """Context manager in which one matmul has one bit flipped in its result.

    The element is drawn from those that are not zero: a flipped bit of zero would often be rounded away.

    Args:
        matmul: index of the matmul in the block, from 0.
        key: of the random element.

    Raises:
        ConfigError: at the end, if there are too few matmuls.
    """

    def __init__(self, matmul: int, key: Sequence[int]):
        super().__init__()
        self._matmul, self._key, self.count = matmul, key, 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self.count <= self._matmul:
            raise ConfigError(
                f"faults.inject: bitflip with matmul={self._matmul} flipped nothing, because this pass has "
                f"only {self.count} matmuls on rank {self._key[0]}"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in MATMULS:
            if self.count == self._matmul:
                _flip(result, self._key)
            self.count += 1
        return result


def _flip(values: Tensor, key: Sequence[int]) -> None:
    """Flip a bit of one element, in place."""
    elements = values.nonzero()
    if len(elements):
        place = tuple(elements[rng.key(*key) % len(elements)].tolist())
        bits = values.view(INTEGERS[values.element_size()])
        bits[place] ^= 1 << HIGHEST_BIT[values.dtype]
