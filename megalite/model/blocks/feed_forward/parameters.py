"""The stored parameters of a dense feed-forward."""

from __future__ import annotations

from megalite.model.spec_builder import SpecBuilder
from megalite.parallel.spec import ParamSpec


def specs(build: SpecBuilder, name: str, width: int) -> list[ParamSpec]:
    """Return gate and up, which are one stored tensor, and down.

    Args:
        width: the inner width.
    """
    model = build.model
    parts = [("gate", width, 1), ("up", width, 1)] if model.gated_mlp else [("up", width, 1)]
    into = build.column(f"{name}.in", parts, model.mlp_bias)
    return into + build.row(f"{name}.down", "down", width, model.mlp_bias)
