"""Rotary tables of a microbatch, which all attention layers of a stage use."""

from __future__ import annotations

from typing import Any

import torch
from megalite_kernels.rotary import rotary_tables
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.model.forward_state import ForwardState

Tables = tuple[Tensor, Tensor]
"""cos and sin."""
Scaling = dict[str, Any] | None
"""model.rope_scaling."""
Widths = tuple[int, int]
"""Width of a head, and number of its channels that rotate."""


class RotaryInputs:
    """Adds cos and sin of the positions to the state of a microbatch.

    Args:
        dtype: of the tables.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self._tables: dict[tuple[Any, ...], Tables] = {}  # by `segments`, lengths, frequencies and widths

    def __call__(self, state: ForwardState) -> None:
        state.rotary, local = self.of_rows(state), self.model.local_rotation
        if local is not None:
            theta = self.model.rope_local_theta or self.model.rope_theta
            state.local_rotary = self.of_positions(state, theta, None, local)

    def of_rows(self, state: ForwardState) -> Tables:
        """Return the tables of layers that look at whole rows."""
        model = self.model
        return self.of_positions(state, model.rope_theta, model.rope_scaling, model.rotation)

    def of_positions(self, state: ForwardState, theta: float, scaling: Scaling, widths: Widths) -> Tables:
        """Return the tables of the positions.

        Cached where all rows have the same positions, which the host knows from `segments`.
        """
        positions = state.document_positions  # [seq, 1] or [seq, batch]
        # empty: positions differ between rows
        shared = state.segments if state.document_start is None else ()
        length, context = 0, self.model.longrope_context
        if context is not None:  # a pass of generation may read a part of rows, or pad them
            length = state.length if state.lengths is None else max(state.lengths)
        longer = length > (context or 0)
        key = (shared, len(positions), longer, theta, scaling is None, widths)
        tables = self._tables.get(key) if shared else None
        if tables is None:
            # [seq] where rows share positions (or batch is 1), else [seq, batch]
            tables = self.computed(positions.squeeze(1), theta, scaling, length, widths)
            if shared:
                self._tables[key] = tables
        return tables

    def computed(
        self, positions: Tensor, theta: float, scaling: Scaling, length: int, widths: Widths
    ) -> Tables:
        device, (width, rotated) = positions.device, widths
        tables: Tables = rotary_tables(positions, width, theta, scaling, self.dtype, device, rotated, length)
        return tables
