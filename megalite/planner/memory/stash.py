"""Bytes that a layer's split backward keeps for its weight pass, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megalite.model.block_kind import BlockSpec
from megalite.model.cost.records import (
    BlockCost,
    Buffer,
    DetachedMatmul,
    Dtype,
    LocalMatmul,
    Matmul,
    Mode,
    size_in_bytes,
)
from megalite.model.cost.units import Units
from megalite.model.kinds import blocks_of

INPUT = "input of the block"


class StashWalk:
    """Goes through a layer's steps in the order of its backward.

    Each matmul stashes its operands, and each step frees what it has saved.

    Tensors that several matmuls stash count once, and so do those that are also saved. Under sequence
    parallelism the backward gathers tensors of its own in their place.

    Args:
        index: of the layer (0-based).
        mode: what the backward finds saved or has restored: all, or all but probabilities.

    Attributes:
        stash: bytes that are stashed in the end.
        peak: the most bytes that are stashed beyond those that have been freed.
    """

    def __init__(self, units: Units, index: int, widths: Mapping[Dtype, int], mode: Mode):
        self.units, self.widths, self.mode = units, widths, mode
        self.gathers = units.share.own_tokens != units.share.tokens
        self.stash = self.peak = 0
        self._now = 0  # bytes stashed beyond those that have been freed
        self._common: dict[str, int] = {}  # bytes of inputs that are both stashed and saved
        self._streams_gradient = False  # whether it is stashed
        blocks = blocks_of(units.model, index)
        for spec, block in reversed(list(zip(blocks, units.layer(index).blocks, strict=True))):
            self._walk(spec, block)

    def _size(self, buffers: Iterable[Buffer]) -> int:
        return size_in_bytes(buffers, self.widths, self.mode)

    def _walk(self, spec: BlockSpec, block: BlockCost) -> None:
        self._now -= self._size(block.after.kept)
        of_stream = not (block.after.forward or block.after.kept or block.dropped or self.gathers)
        reader = ""  # the matmul whose input is the output of the next step
        for step in reversed(block.steps):
            if not isinstance(step, Matmul):
                self._now += self._common.pop(reader, 0) - self._size(step.kept)
                continue
            reader, stashed = step.name, self._size(step.stashed)
            if stashed:
                stashed -= self._counted_already(step, block)
                if of_stream and step is block.matmuls[-1] and step.rows * step.outputs == self.units.own:
                    stashed -= self.units.own * self.widths["compute"] if self._streams_gradient else 0
                    self._streams_gradient = True
                self.stash += stashed
                # adapters have saved what is between their factors
                self._add(stashed - self._size((step.between,)))
                self._now += self._size((step.between,))
            self._now -= self._size(step.kept)
        has_norm = spec.input_norm is not None or not spec.beside
        self._now += (self._common.pop(INPUT, 0) if has_norm else 0) - self._size(block.before.kept)
        self._streams_gradient = self._streams_gradient and spec.beside

    def _add(self, stashed: int) -> None:
        self._now += stashed
        self.peak = max(self.peak, self._now)

    def _counted_already(self, matmul: Matmul, block: BlockCost) -> int:
        """Return the bytes of the matmul's input if an earlier matmul has stashed it.

        The first one that stashes a saved tensor stashes nothing new until that is freed.
        """
        key = self._input_of(matmul, block)
        if key is None:
            return 0
        size, again = matmul.rows * matmul.inputs * self.widths["compute"], key in self._common
        if not again:
            self._common[key] = size
            self._now -= size
        return size if again else 0

    def _input_of(self, matmul: Matmul, block: BlockCost) -> str | None:
        """Return which saved tensor a matmul stashes as its input, and None if it stashes one of its own."""
        if isinstance(matmul, LocalMatmul) and matmul.at_least_fp32:
            same = self.widths["accumulate"] == self.widths["compute"]
            return INPUT if same else None
        if isinstance(matmul, DetachedMatmul):
            return matmul.input_of or INPUT
        gathers = self.gathers and matmul.split == "outputs" and not isinstance(matmul, LocalMatmul)
        if gathers:
            return None
        if matmul in block.reading:
            return INPUT
        return matmul.name if matmul is not block.matmuls[-1] or block.keeps_last_input else None
