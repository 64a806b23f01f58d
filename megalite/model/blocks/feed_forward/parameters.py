"""The stored parameters of a dense feed-forward."""

from __future__ import annotations

from math import expm1, log

from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment

XIELU = {"alpha_p": log(expm1(0.8)), "alpha_n": log(expm1(0.3))}
"""Initial values of xIELU's trained numbers: 0.8 for both of its factors."""


def specs(build: SpecBuilder, name: str, width: int) -> list[ParamSpec]:
    """Return gate and up, which are one stored tensor, the numbers of the activation, and down.

    Args:
        width: the inner width.
    """
    model = build.model
    parts = [("gate", width, 1), ("up", width, 1)] if model.gated_mlp else [("up", width, 1)]
    into = build.column(f"{name}.in", parts, model.mlp_bias)
    if model.hidden_act == "xielu":
        axis = "tp" if build.tp > 1 else None  # each rank's gradient is of its own channels only
        into += one_each(
            build.unit,
            *(
                Segment(f"{name}.{alpha}.weight", (1,), grad_partial_axis=axis, decay=False, init_value=value)
                for alpha, value in XIELU.items()
            ),
        )
    return into + build.row(f"{name}.down", "down", width, model.mlp_bias)
