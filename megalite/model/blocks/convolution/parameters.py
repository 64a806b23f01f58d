"""The stored parameters of a convolution block, split over tp by channel."""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment

PREFIX = "conv_"  # of roles


def specs(build: SpecBuilder, name: str) -> list[ParamSpec]:
    """Return the projection, whose rows are the gates B and C and the values x, the convolution [hidden, K],
    and the output projection."""
    model: ModelConfig = build.model
    hidden = model.hidden_size
    parts, roles = [(part, hidden, 1) for part in "BCx"], {part: PREFIX + part for part in "BCx"}
    stored = build.column(f"{name}.in", parts, model.conv_bias, roles)
    taps = (hidden, model.conv_kernel)
    stored += one_each(build.unit, Segment(f"{name}.conv.weight", taps, 0, decay=False, init_std=build.std))
    if model.conv_bias:
        stored += one_each(build.unit, Segment(f"{name}.conv.bias", (hidden,), 0, decay=False))
    return stored + build.row(f"{name}.out", f"{PREFIX}o", hidden, model.conv_bias)
