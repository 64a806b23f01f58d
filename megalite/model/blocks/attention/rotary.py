"""Rotary tables of a microbatch, which all attention layers of a stage use."""

from __future__ import annotations

from typing import Any

import torch
from megalite_kernels.rotary import rotary_tables
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.model.blocks.attention.query_scale import query_factors
from megalite.model.forward_state import ForwardState
from megalite.parallel.context.parts import PositionSegments

Tables = tuple[Tensor, Tensor]
"""cos and sin."""


class RotaryInputs:
    """Adds cos and sin of the positions to the state of a microbatch, and their factors on queries.

    Args:
        dtype: of the tables.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self._tables: dict[tuple[Any, ...], Tables] = {}  # by `segments`, length and frequencies
        self._factors: dict[PositionSegments, Tensor | None] = {}

    def __call__(self, state: ForwardState) -> None:
        state.rotary = self.of_rows(state)
        if self.model.rope_local_theta is not None:
            state.local_rotary = self.of_positions(state, self.model.rope_local_theta, None)
        if self.model.query_scale_beta is not None:
            state.query_factors = self.factors(state)

    def of_rows(self, state: ForwardState) -> Tables:
        """Return the tables of layers that look at whole rows."""
        return self.of_positions(state, self.model.rope_theta, self.model.rope_scaling)

    def of_positions(self, state: ForwardState, theta: float, scaling: dict[str, Any] | None) -> Tables:
        """Return the tables of the positions.

        Cached where all rows have the same positions, which the host knows from `segments`.
        """
        positions = state.document_positions  # [seq, 1] or [seq, batch]
        # empty: positions differ between rows
        shared = state.segments if state.document_start is None else ()
        key = (shared, len(positions), theta, scaling is None)
        tables = self._tables.get(key) if shared else None
        if tables is None:
            # [seq] where rows share positions (or batch is 1), else [seq, batch]
            length = 0 if self.model.longrope_context is None else state.length
            tables = self.computed(positions.squeeze(1), theta, scaling, length)
            if shared:
                self._tables[key] = tables
        return tables

    def factors(self, state: ForwardState) -> Tensor | None:
        """Return the factors on queries, cached as the tables."""
        shared = state.segments if state.document_start is None else ()
        if not shared:
            return query_factors(self.model, state, self.dtype)
        if shared not in self._factors:
            self._factors[shared] = query_factors(self.model, state, self.dtype)
        return self._factors[shared]

    def computed(
        self, positions: Tensor, theta: float, scaling: dict[str, Any] | None, length: int
    ) -> Tables:
        width, rotated = self.model.rotary_width, self.model.rotary_dim
        tables: Tables = rotary_tables(
            positions, width, theta, scaling, self.dtype, positions.device, rotated, length
        )
        return tables
