"""The stored parameters of a delta block.

Queries and keys are split over tp by key head, everything else by value head. tp ranks beyond the number of
key heads hold copies of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from megalite.config.sections.model import ModelConfig
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.initial_values import InverseSoftplus, LogUniform
from megalite.parallel.spec import ParamSpec, Segment

PREFIX = "delta_"  # of roles


def roles_of(parts: Iterable[str]) -> dict[str, str]:
    """Return the roles of the matrices of these names."""
    return {part: PREFIX + part for part in parts}


def key_replicas(model: ModelConfig, tp: int) -> int:
    """Return the number of tp ranks that hold the same key head."""
    return max(1, tp // model.linear_num_key_heads)


def specs(build: SpecBuilder, name: str) -> list[ParamSpec]:
    """Return the projections, the convolution, decay, norm and output projection.

    With a decay for each head the rows of the projection are q, k, v, the gate z, the strength b, and the
    decay a. With one for each channel, decay and gate are computed from latents (`low`), and the rows are q,
    k, v, b.
    """
    model, copies = build.model, key_replicas(build.model, build.tp)
    heads = model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * model.linear_key_head_dim, heads * model.linear_value_head_dim
    by_channel = model.delta_decay == "channel"
    parts = [("q", keys, copies), ("k", keys, copies), ("v", values, 1)]
    parts += [("b", heads, 1)] if by_channel else [("z", values, 1), ("b", heads, 1), ("a", heads, 1)]
    stored = build.column(f"{name}.in", parts, bias=False, roles=roles_of(part for part, *_ in parts))
    if by_channel:
        stored += _low_rank(build, name, values)
    stored.append(_convolution(build, name, (keys, copies), (keys, copies), (values, 1)))
    decays = heads * model.linear_key_head_dim if by_channel else heads
    stored += one_each(
        build.unit,
        Segment(f"{name}.a_log", (heads,), 0, decay=False, initial=LogUniform()),
        Segment(f"{name}.dt_bias", (decays,), 0, decay=False, initial=InverseSoftplus()),
        at_least_fp32=True,
    )
    # each rank's gradient is of its own heads only
    axis = "tp" if build.tp > 1 else None
    norm = Segment(
        f"{name}.norm.weight",
        (model.linear_value_head_dim,),
        decay=False,
        init_value=1.0,
        role="norms",
        grad_partial_axis=axis,
    )
    stored += one_each(build.unit, norm)
    return stored + build.row(f"{name}.out", f"{PREFIX}o", values, bias=False)


def _convolution(build: SpecBuilder, name: str, *widths: tuple[int, int]) -> ParamSpec:
    """Return the weights of the convolution of q, k and v, [channels, K].

    Args:
        widths: channels and copies of each.
    """
    model = build.model
    taps = model.linear_conv_kernel_dim
    segments = tuple(
        Segment(f"{name}.conv_{part}.weight", (width, taps), 0, copies, decay=False, init_std=build.std)
        for part, (width, copies) in zip("qkv", widths, strict=True)
    )
    return ParamSpec(f"{name}.conv.weight", build.unit, segments)


def _low_rank(build: SpecBuilder, name: str, values: int) -> list[ParamSpec]:
    """Return the matrices of decay (f) and gate (g): to a latent of a head's width, from it to all heads."""
    model = build.model
    width, decays = (
        model.linear_value_head_dim,
        model.linear_num_value_heads * model.linear_key_head_dim,
    )
    down = tuple(
        segment
        for part in "fg"
        for spec in build.whole(f"{name}.{part}_a.weight", width, f"{PREFIX}{part}_a")
        for segment in spec.segments
    )
    up = [
        Segment(f"{name}.{part}_b.weight", (rows, width), 0, init_std=build.std, role=f"{PREFIX}{part}_b")
        for part, rows in (("f", decays), ("g", values))
    ]
    return [ParamSpec(f"{name}.low.weight", build.unit, down), *one_each(build.unit, *up)]
