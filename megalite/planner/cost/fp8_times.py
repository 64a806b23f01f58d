"""The time of a layer's matmuls in fp8 (`train.fp8`), and of quantizing their operands.

Recipes of other training codes are included, so that their published speeds can be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megalite.planner.hardware.devices import Device
from megalite.planner.hardware.kernels import ELEMENTWISE_BYTES, matmul, matmul_at, stream

if TYPE_CHECKING:
    from megalite.planner.memory.domains import Parameters
    from megalite.planner.time.step import LayoutChoice


class Fp8Recipe(NamedTuple):
    """How matmuls in fp8 differ from those in 16 bits.

    Attributes:
        format: what is multiplied (`Device.fp8`).
        speed: fraction of the sustained fp8 rate (the dense peak of fp8 times the device's `sustained`) that
            large matmuls reach.
        quantized: bytes that quantization moves per element of an activation or a gradient.
        weight_gradient: whether weight gradients always multiply in fp8; `quantized` includes their operands.
    """

    format: str
    speed: float
    quantized: float
    weight_gradient: bool = False


RECIPES = {
    "block": Fp8Recipe("e4m3", 0.76, 3 + 4 / 128),
    "mxfp8": Fp8Recipe("mxfp8", 0.95, 3 + 1 / 32),
    "delayed": Fp8Recipe("e4m3", 0.95, 4, weight_gradient=True),
    "current": Fp8Recipe("e4m3", 0.95, 6, weight_gradient=True),
    "mxfp8-all": Fp8Recipe("mxfp8", 0.95, 4 + 2 / 32, weight_gradient=True),
}
"""Name → recipe: those of `train.fp8`; and of other codes one scale per tensor from earlier steps (delayed)
or from the tensor itself (current), and mxfp8 of all three matmuls.

`quantized`: the element is read in 16 bits and written in 8, with its part of a scale; codes for weight
gradients are written a second time, transposed; a scale of the whole tensor needs one more read.

`speed` is from published times of large matmuls alone on H100, relative to bf16 there, of which 2 is the
ratio of the peaks: 1.9 to 2.1 with a scale per row, and 1.4 to 1.5 with a scale per block in Triton
(pytorch/FBGEMM#2546); others published 0.6 to 0.7 for a Triton kernel and 1.7 for CUTLASS with the same
blocks (pytorch/ao#2784). mxfp8 has scales in the tensor cores. Ours are not measured yet."""

EMULATED = {True: 46, False: 16}
"""Whether on a CPU → bytes that quantization moves per element, where operands are rounded to fp8 and
multiplied in a wider precision (`train.kernels: torch`). PyTorch's operations read and write fp32 several
times; on a GPU a kernel quantizes."""
DEQUANTIZED = 13  # of these, per element of a weight: read in 8 bits, written, read and written in fp32


@dataclass(frozen=True)
class Fp8Times:
    """Times of matmuls on a device.

    Args:
        precision: of all other operations.
    """

    device: Device
    recipe: str
    precision: str

    @property
    def emulated(self) -> bool:
        """Whether rounded operands are multiplied in `wider`, because the device has no such matmuls."""
        return self._rate is None

    @property
    def wider(self) -> str:
        """The precision of emulated matmuls. bf16 holds a code times a power of two exactly."""
        if self.recipe == "mxfp8" and not self.device.cpu:
            return self.precision
        return "fp32" if "fp32" in self.device.peaks else self.precision

    @property
    def quantized(self) -> float:
        """Bytes moved per element of an activation or a gradient."""
        return EMULATED[self.device.cpu] if self.emulated else RECIPES[self.recipe].quantized

    @property
    def _rate(self) -> float | None:
        """FLOP/s that large matmuls would reach with the sustained fraction 1; None: emulated."""
        peak = self.device.fp8.get(RECIPES[self.recipe].format)
        return None if peak is None else peak * RECIPES[self.recipe].speed

    def time(self, m: float, n: float, k: float, batch: float = 1, written: float | None = None) -> float:
        """Return the time of `batch` matmuls of codes, [m, k] and [k, n].

        Args:
            written: as for `kernels.matmul`.
        """
        written = ELEMENTWISE_BYTES[self.precision] if written is None else written
        if (rate := self._rate) is not None:
            sizes = {"size": 1.0, "batch": batch, "written": written}
            return matmul_at(
                self.device, m, n, k, peak=rate, faster=rate / self.device.peak(self.precision), **sizes
            )
        weight = stream(self.device, DEQUANTIZED * batch * n * k)
        return weight + matmul(self.device, m, n, k, self.wider, batch, written)

    def quantize(self, *elements: float) -> float:
        """Return the time to quantize activations or gradients with these numbers of elements."""
        return sum(stream(self.device, each * self.quantized) for each in elements)

    def transpose(self, elements: float) -> float:
        """Return the time to copy the codes of a transposed weight for an input gradient.

        Before Blackwell the kernel of `block` does so.
        """
        copied = self.recipe == "block" and not self.emulated and "mxfp8" not in self.device.fp8
        return stream(self.device, 2 * elements) if copied else 0.0

    def after_update(self, choice: LayoutChoice, held: Sequence[Parameters]) -> float:
        """Return the time of the fullest rank to quantize its weights after an update.

        With ZeRO-3 these are its shards of those that are gathered as codes.
        """
        if not _shards_weights(choice):
            return self._weights(max(size.quantized for size in held))
        return self._weights(max(size.coded for size in held) / choice.dims.shard)

    def at_each_use(self, choice: LayoutChoice, size: Parameters) -> float:
        """Return the time to quantize weights that ZeRO-3 gathers in the run's precision."""
        if not _shards_weights(choice):
            return 0.0
        return self._weights(size.quantized - (0.0 if choice.offload_parameters else size.coded))

    def _weights(self, elements: float) -> float:
        """Return the time to quantize weights; `mxfp8` does so along both dimensions."""
        return self.quantize(elements * (2 if self.recipe == "mxfp8" else 1)) if elements else 0.0

    def weight_operands(self, *elements: float) -> float:
        """Return the time to quantize both operands of a weight gradient along the tokens, if that is not
        part of `quantized`."""
        return 0.0 if RECIPES[self.recipe].weight_gradient else self.quantize(*elements)


def _shards_weights(choice: LayoutChoice) -> bool:
    return choice.zero == 3 and choice.dims.shard > 1
