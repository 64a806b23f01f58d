"""Maximal update parametrization of the stored parameters (`model.mup`).

Yang et al. 2022, "Tensor Programs V": weights start and change so that the elements of activations, and their
changes in a step, are of one size at every width. The growth of each matrix is that of its shape over the
shape of the same matrix in the base model (`config.mup`). It decides by itself, whatever the block:

    rows, columns grow        as        initial deviation    rate of AdamW (`optimizer.registry`)
    both; only columns        matrix    σ / √growth          lr / growth of the columns
    only rows; neither        vector    σ                    lr
    embedding, positions      table     σ                    lr
    head, tied or not         table     σ                    lr; its input is divided by the width's growth

The shapes are global, so no layout changes a number. Where only the columns grow (routers, key-value heads of
a fixed number, latents of a fixed rank) the mup package has a constant deviation and rate, with which the
outputs of these matrices grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from megalite.parallel.spec import ParamSpec, Segment

TABLES = ("embedding.weight", "positions.weight", "head.weight")


def with_growth(specs: Sequence[ParamSpec], base: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Return the specs with growth and initial values of each segment.

    Args:
        base: those of the base model, of the same names.
    """
    shapes = {segment.name: segment.shape for spec in base for segment in spec.segments}
    return [
        replace(spec, segments=tuple(_grown(segment, shapes[segment.name]) for segment in spec.segments))
        for spec in specs
    ]


def _grown(segment: Segment, base: tuple[int, ...]) -> Segment:
    if len(segment.shape) != 2 or segment.name in TABLES:
        return segment
    rows, columns = (own / of_base for own, of_base in zip(segment.shape, base, strict=True))
    return replace(segment, growth=(rows, columns), init_std=segment.init_std / sqrt(columns))
