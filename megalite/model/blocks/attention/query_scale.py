"""A factor on queries that grows with the position (Ministral 3).

    q · (1 + β · log(1 + ⌊position / positions⌋))

Positions are those of tokens in their documents. The factor is 1 up to `positions`: shorter rows have no
factors, and cost nothing. No communication.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.model.forward_state import ForwardState
from megalite.parallel.context.parts import PositionSegments


class QueryScaleInputs:
    """Adds the factors of the positions to the state of a microbatch.

    Args:
        dtype: of the factors, which are computed in at least fp32.
        tables: what adds the rotary tables.
    """

    def __init__(self, model: ModelConfig, dtype: torch.dtype, tables: Callable[[ForwardState], None]):
        self.beta, self.positions = model.query_scale_beta or 0.0, model.query_scale_positions or 1
        self.dtype, self.tables = dtype, tables
        self._factors: dict[PositionSegments, Tensor] = {}  # where all rows have the same positions

    def __call__(self, state: ForwardState) -> None:
        self.tables(state)
        if _end(state) > self.positions:  # else they are 1
            state.query_factors = self.of_rows(state)

    def of_rows(self, state: ForwardState) -> Tensor:
        """Return the factors, [seq, 1 or batch, 1, 1]."""
        shared = state.segments if state.document_start is None else ()
        if shared in self._factors:
            return self._factors[shared]
        steps = torch.div(state.document_positions, self.positions, rounding_mode="floor")
        wide = torch.promote_types(self.dtype, torch.float32)
        factors = (1 + self.beta * torch.log1p(steps.to(wide))).to(self.dtype)[:, :, None, None]
        if shared:
            self._factors[shared] = factors
        return factors


def _end(state: ForwardState) -> int:
    """Return a number that all positions of a microbatch are below, without a look at the device.

    Rows of generation differ: the longest one counts.
    """
    if state.segments:
        return max(start + length for start, length in state.segments)
    return state.length if state.lengths is None else max(state.lengths)
