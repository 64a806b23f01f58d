"""The stored parameters of a model with adapters: the model's own, frozen, and the adapters.

Names: `layers.3.attention.q.lora_a` is A [rank, in], `…lora_b` is B [out, rank], and with `lora.dora`
`…lora_magnitude` [out] is added to the norm of each row. Each of a layer's experts has its own A and B; they
are stacked like the experts, and split over the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.config.schema import Config
from megalite.config.sections.lora import EXPERTS, PROJECTIONS, LoraConfig
from megalite.config.sections.model import ModelConfig
from megalite.model.parameters import model_specs
from megalite.model.spec_builder import INDEXER, REWARD
from megalite.parallel.quantized.layout import BaseForm
from megalite.parallel.spec import ParamSpec, Segment, parameter_count

ADAPTER = "adapter"  # role of the segments of adapters
A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"


def name_of(weight: str, part: str) -> str:
    """Return the name of a part (A, B, MAGNITUDE) of a weight's adapter."""
    return weight.removesuffix("weight") + part


def trained_specs(specs: Sequence[ParamSpec], config: Config, tp: int = 1) -> list[ParamSpec]:
    """Return the specs as a run trains them: with adapters, or in a warm-up of indexers these alone."""
    if config.train.indexer == "warmup":
        return [_frozen(spec, (INDEXER,)) for spec in specs]
    return with_adapters(specs, config.lora, tp)


def with_adapters(specs: Sequence[ParamSpec], lora: LoraConfig, tp: int = 1) -> list[ParamSpec]:
    """Return the specs of a model with adapters.

    The model's own are frozen except for `lora.modules_to_save` and the head of a reward model. If
    `lora.rank` is 0, the specs are returned unchanged.
    """
    if not lora.rank:
        return list(specs)
    base = [_quantized(_frozen(spec, (*(lora.modules_to_save or ()), REWARD)), lora) for spec in specs]
    axis = "tp" if tp > 1 else None
    return base + [adapter for spec in specs for adapter in _adapters(spec, lora, axis)]


def _frozen(spec: ParamSpec, trained_roles: Sequence[str]) -> ParamSpec:
    segments = tuple(replace(segment, trainable=segment.role in trained_roles) for segment in spec.segments)
    return replace(spec, segments=segments)


def _quantized(spec: ParamSpec, lora: LoraConfig) -> ParamSpec:
    """Return the spec of a frozen tensor in the form of `lora.base`, if it is a matrix of a layer.

    The matrices of a layer's experts are quantized as one, stacked. If rows are not whole blocks, which mxfp4
    needs, a matrix keeps the compute precision.
    """
    if lora.base == "none":
        return spec
    form = BaseForm(lora.base, lora.double_quant)
    quantized = all(
        segment.role in (*PROJECTIONS, *EXPERTS) and len(segment.shape) == 2 and form.fits(segment.shape[1])
        for segment in spec.segments
    )
    return replace(spec, base=form) if quantized else spec


def _adapters(spec: ParamSpec, lora: LoraConfig, partial_axis: str | None) -> list[ParamSpec]:
    """Return the adapters of a stored tensor's segments.

    The A's are one stored tensor, since they read the same input; B's and magnitudes are one each.

    A is drawn from a normal distribution with the variance of PEFT's uniform one; B and the magnitudes start
    at zero.

    Args:
        partial_axis: the axis whose ranks split the tensor; `parallel.tensor.lora` says which gradients are
            then partial.
    """
    if spec.domain == "expert":
        return _expert_adapters(spec, lora)
    down, others = [], []
    for base in spec.segments:
        if not lora.adapts(base.role):
            continue
        (outputs, inputs), rank = base.shape, lora.rank_of(base.role)
        column, row = base.split == 0, base.split == 1
        if base.split is None:  # whole on each rank of the axis: both gradients are partial as the base's is
            a_axis = b_axis = base.grad_partial_axis
        else:
            a_axis, b_axis = (partial_axis, None) if column else (None, partial_axis)
        like_a = Segment(name_of(base.name, A), (rank, inputs), 1 if row else None, role=ADAPTER)
        like_a = replace(like_a, growth=(1.0, base.growth[1]))
        down.append(replace(like_a, grad_partial_axis=a_axis, init_std=(3 * inputs) ** -0.5))
        split = 0 if column else None
        b = Segment(name_of(base.name, B), (outputs, rank), split, base.replicas, role=ADAPTER)
        others.append(replace(b, grad_partial_axis=b_axis, growth=(base.growth[0], 1.0)))
        if lora.dora:  # without weight decay, as norms: it would shrink the frozen weight
            magnitude = replace(others[-1], name=name_of(base.name, MAGNITUDE), shape=(outputs,), decay=False)
            others.append(magnitude)
    stored = [ParamSpec(name_of(spec.name, A), spec.unit, tuple(down))] if down else []
    return stored + [ParamSpec(segment.name, spec.unit, (segment,)) for segment in others]


def _expert_adapters(spec: ParamSpec, lora: LoraConfig) -> list[ParamSpec]:
    """Return A [experts · rank, in] and B [experts · out, rank] of a layer's experts."""
    (base,) = spec.segments
    if not lora.adapts(base.role):
        return []
    (outputs, inputs), rank = base.shape, lora.rank_of(base.role)
    b = replace(base, name=name_of(base.name, B), shape=(outputs, rank), fused=1, init_std=0.0)
    b = replace(b, trainable=True, role=ADAPTER, growth=(base.growth[0], 1.0))
    a = replace(b, name=name_of(base.name, A), shape=(base.experts * rank, inputs))
    a = replace(a, growth=(1.0, base.growth[1]), init_std=(3 * inputs) ** -0.5)
    return [replace(spec, name=segment.name, segments=(segment,)) for segment in (a, b)]


def total_parameters(model: ModelConfig, lora: LoraConfig) -> int:
    """Return the number of parameters of a model with its adapters."""
    return parameter_count(with_adapters(model_specs(model), lora))
