"""Rotary tables of a microbatch, which all attention layers of a stage use."""

from __future__ import annotations

from typing import Any

import torch
from megalite_kernels.rotary import rotary_tables
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.model.forward_state import ForwardState

Tables = tuple[Tensor, Tensor]


class RotaryInputs:
    """Adds cos and sin of the positions to the state of a microbatch.

    Args:
        dtype: of the tables.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self._tables: dict[tuple[Any, ...], Tables] = {}  # by `segments`, length and frequencies

    def __call__(self, state: ForwardState) -> None:
        model = self.model
        if state.lengths is not None and model.longrope_context is not None:
            state.rotary = self._by_length(state, model.longrope_context)
        else:
            state.rotary = self._of_positions(state, model.rope_theta, model.rope_scaling)
        if model.rope_local_theta is not None:
            state.local_rotary = self._of_positions(state, model.rope_local_theta, None)

    def _of_positions(self, state: ForwardState, theta: float, scaling: dict[str, Any] | None) -> Tables:
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
            tables = self._computed(positions.squeeze(1), theta, scaling, length)
            if shared:
                self._tables[key] = tables
        return tables

    def _by_length(self, state: ForwardState, context: int) -> Tables:
        """Return tables in which each row has the frequencies of its own length (longrope)."""
        assert state.lengths is not None
        model, longer = self.model, [length > context for length in state.lengths]
        if any(longer) == all(longer):
            return self._of_positions(state, model.rope_theta, model.rope_scaling)
        positions = state.positions.expand(-1, len(longer))  # [seq, rows]
        short, long = (
            self._computed(positions, model.rope_theta, model.rope_scaling, length)
            for length in (min(state.lengths), max(state.lengths))
        )
        which = torch.tensor(longer, device=positions.device)[:, None]
        return torch.where(which, long[0], short[0]), torch.where(which, long[1], short[1])

    def _computed(
        self, positions: Tensor, theta: float, scaling: dict[str, Any] | None, length: int
    ) -> Tables:
        model, device = self.model, positions.device
        tables: Tables = rotary_tables(
            positions, model.rotary_width, theta, scaling, self.dtype, device, model.rotary_dim, length
        )
        return tables
