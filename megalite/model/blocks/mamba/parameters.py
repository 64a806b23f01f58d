"""The stored parameters of a mamba block.

B and C are split over tp by group, everything else by head. tp ranks beyond the number of groups hold copies
of B and C.
"""

from __future__ import annotations

from megalite.config.sections.model import ModelConfig
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.initial_values import InverseSoftplus, LogIndex
from megalite.parallel.spec import ParamSpec, Segment

PREFIX = "mamba_"  # of roles


def group_replicas(model: ModelConfig, tp: int) -> int:
    """Return the number of tp ranks that hold the same group."""
    return max(1, tp // model.mamba_n_groups)


def specs(build: SpecBuilder, name: str) -> list[ParamSpec]:
    """Return the projection, the convolution, decay, skip, norm and output projection.

    The rows of the projection are the gate z, the input x, B, C, and the step dt of each head.
    """
    model, copies, heads = build.model, group_replicas(build.model, build.tp), build.model.mamba_num_heads
    inner, states = heads * model.mamba_head_dim, model.mamba_n_groups * model.mamba_state_size
    parts = [("z", inner, 1), ("x", inner, 1), ("B", states, copies), ("C", states, copies), ("dt", heads, 1)]
    stored = build.column(
        f"{name}.in", parts, model.mamba_proj_bias, {part: PREFIX + part for part, *_ in parts}
    )
    stored += _convolution(build, name, parts[1:4])
    stored += one_each(
        build.unit,
        Segment(f"{name}.a_log", (heads,), 0, decay=False, initial=LogIndex()),
        Segment(f"{name}.d", (heads,), 0, decay=False, init_value=1.0),
        Segment(f"{name}.dt_bias", (heads,), 0, decay=False, initial=InverseSoftplus()),
        at_least_fp32=True,
    )
    if model.mamba_norm != "none":
        norm = Segment(f"{name}.norm.weight", (inner,), 0, decay=False, init_value=1.0, role="norms")
        stored += one_each(build.unit, norm)
    return stored + build.row(f"{name}.out", f"{PREFIX}o", inner, model.mamba_proj_bias)


def _convolution(build: SpecBuilder, name: str, parts: list[tuple[str, int, int]]) -> list[ParamSpec]:
    """Return the weights of the convolution of x, B and C, [channels, K], and its bias."""
    model = build.model
    weights = tuple(
        Segment(
            f"{name}.conv_{part}.weight",
            (width, model.mamba_conv_kernel),
            0,
            copies,
            decay=False,
            init_std=build.std,
        )
        for part, width, copies in parts
    )
    biases = tuple(
        Segment(f"{name}.conv_{part}.bias", (width,), 0, copies, decay=False) for part, width, copies in parts
    )
    weight = ParamSpec(f"{name}.conv.weight", build.unit, weights)
    return [weight, ParamSpec(f"{name}.conv.bias", build.unit, biases)] if model.mamba_conv_bias else [weight]
