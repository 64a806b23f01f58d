"""The stored parameters of a model with adapters: the model's own, frozen, and those of each adapted weight.

Each of a layer's experts has its own A and B; they are stacked like the experts, and split over the same
ranks.

Names: `layers.3.attention.q.lora_a` is A [rank, in], `…lora_b` B [out, rank], and with `lora.dora`
`…lora_magnitude` [out], what has been added to the length of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.config.schema import LoraConfig, ModelConfig
from megalite.model.parameters import model_specs
from megalite.parallel.spec import ParamSpec, Segment, parameter_count

ADAPTER = "adapter"  # the role of their segments
A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"


def name_of(weight: str, part: str) -> str:
    """The name of a part (A, B, MAGNITUDE) of a weight's adapter."""
    return weight.removesuffix("weight") + part


def with_adapters(specs: Sequence[ParamSpec], lora: LoraConfig, tp: int = 1) -> list[ParamSpec]:
    """The specs, frozen but for `lora.modules_to_save`, followed by those of the adapters; unchanged where
    `lora.rank` is 0."""
    if not lora.rank:
        return list(specs)
    saved = lora.modules_to_save or ()
    own = [
        replace(spec, segments=tuple(replace(each, trainable=each.role in saved) for each in spec.segments))
        for spec in specs
    ]
    return own + [adapter for spec in specs for adapter in _adapters(spec, lora, "tp" if tp > 1 else None)]


def _adapters(spec: ParamSpec, lora: LoraConfig, partial_axis: str | None) -> list[ParamSpec]:
    """The A's of a stored tensor's segments, one stored tensor since they read the same input; their B's and
    magnitudes, one each.

    A is drawn from a normal distribution with the variance of PEFT's uniform one; B and the magnitudes start
    at zero. `partial_axis`: the axis whose ranks split the tensor; `parallel.tensor.lora` says which
    gradients are then partial.
    """
    if spec.domain == "expert":
        return _of_experts(spec, lora)
    first, others = [], []
    for base in (segment for segment in spec.segments if lora.adapts(segment.role)):
        (outputs, inputs), rank, by_rows = base.shape, lora.rank_of(base.role), base.split == 0
        a_partial, b_partial = (partial_axis, None) if by_rows else (None, partial_axis)
        # the whole matrix on each rank of the axis: what is partial of the base is of both
        if base.split is None:
            a_partial = b_partial = base.grad_partial_axis
        split = 1 if base.split == 1 else None
        first.append(
            Segment(
                name_of(base.name, A),
                (rank, inputs),
                split,
                grad_partial_axis=a_partial,
                init_std=(3 * inputs) ** -0.5,
                role=ADAPTER,
            )
        )
        split = 0 if by_rows else None
        others.append(
            Segment(
                name_of(base.name, B),
                (outputs, rank),
                split,
                base.replicas,
                grad_partial_axis=b_partial,
                role=ADAPTER,
            )
        )
        if lora.dora:  # without weight decay, as norms: it would shrink the frozen weight
            magnitude = name_of(base.name, MAGNITUDE)
            others.append(
                Segment(
                    magnitude,
                    (outputs,),
                    split,
                    base.replicas,
                    grad_partial_axis=b_partial,
                    decay=False,
                    role=ADAPTER,
                )
            )
    stored = [ParamSpec(name_of(spec.name, A), spec.unit, tuple(first))] if first else []
    return stored + [ParamSpec(each.name, spec.unit, (each,)) for each in others]


def _of_experts(spec: ParamSpec, lora: LoraConfig) -> list[ParamSpec]:
    """A [experts · rank, in] and B [experts · out, rank] of a layer's experts."""
    (base,) = spec.segments
    if not lora.adapts(base.role):
        return []
    (outputs, inputs), rank = base.shape, lora.rank_of(base.role)
    like = replace(base, fused=1, init_std=0.0, trainable=True, role=ADAPTER)
    a = replace(
        like, name=name_of(base.name, A), shape=(base.experts * rank, inputs), init_std=(3 * inputs) ** -0.5
    )
    b = replace(like, name=name_of(base.name, B), shape=(outputs, rank))
    return [replace(spec, name=each.name, segments=(each,)) for each in (a, b)]


def total_parameters(model: ModelConfig, lora: LoraConfig) -> int:
    """Number of parameters of a model with its adapters."""
    return parameter_count(with_adapters(model_specs(model), lora))
