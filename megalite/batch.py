"""One microbatch: what a forward pass of one data-parallel rank consumes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a target that costs nothing (torch's and Hugging Face's convention)


@dataclass
class Microbatch:
    """Attributes:

    tokens: [seq, batch] int64.
    targets: [seq, batch] int64, IGNORE_INDEX where the loss is not counted.
    samples: [batch] int64, global sample index of each row: the key of dropout.
    document_start: [seq, batch] int64, index in the row of the first token of each token's document; None where a row is one document.
    """

    tokens: Tensor
    targets: Tensor
    samples: Tensor
    document_start: Tensor | None = None

    def to(self, device: torch.device) -> Microbatch:
        """The same on a device; the copy does not wait for the device's work."""
        if device.type == "cpu":
            return self

        def moved(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True)

        start = None if self.document_start is None else moved(self.document_start)
        return Microbatch(moved(self.tokens), moved(self.targets), moved(self.samples), start)
