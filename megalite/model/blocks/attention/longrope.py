"""Rotary tables with the frequencies of longrope, where rows have different lengths."""

from __future__ import annotations

import torch

from megalite.model.blocks.attention.rotary import RotaryInputs, Tables
from megalite.model.forward_state import ForwardState


class LongropeInputs(RotaryInputs):
    """`RotaryInputs` in which each row of generation has the frequencies of its own length."""

    def of_rows(self, state: ForwardState) -> Tables:
        model, lengths, context = self.model, state.lengths, self.model.longrope_context
        if lengths is None or context is None:
            return super().of_rows(state)
        longer = [length > context for length in lengths]
        if any(longer) == all(longer):
            return super().of_rows(state)
        positions = state.positions.expand(-1, len(longer))  # [seq, rows]
        short, long = (
            self.computed(positions, model.rope_theta, model.rope_scaling, length, model.rotation)
            for length in (min(lengths), max(lengths))
        )
        which = torch.tensor(longer, device=positions.device)[:, None, None]
        return torch.where(which, long[0], short[0]), torch.where(which, long[1], short[1])
