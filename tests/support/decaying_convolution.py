"""A kind of block with weights that stay in fp32: a gated convolution whose channels decay, as those of a recurrence.

out(gate · convolution(value) · exp(−exp(a_log) · softplus(dt_bias))), with a_log and dt_bias [hidden] split by channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.kinds import register
from megalite.model.layer_options import LayerOptions
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.initial_values import InverseSoftplus, LogUniform
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.weight import Weight
from tests.support import jobs, jobs_training
from tests.support.short_convolution import ShortConvolution, ShortConvolutionKind

KIND = "decaying_convolution"
SEEN: set[str] = set()  # dtypes of the weights that forwards have read


class _Decay(torch.autograd.Function):
    """x · exp(−exp(a_log) · softplus(dt_bias)), [seq, batch, channels/tp]; the decay in at least fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a_log: Weight, dt_bias: Weight) -> Tensor:
        SEEN.update(f"{weight.spec.name.rsplit('.')[-1]} {weight.tensor.dtype}" for weight in (a_log, dt_bias))
        ctx.weights = a_log, dt_bias
        ctx.save_for_backward(x)
        return (x * _decay(a_log, dt_bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (a_log, dt_bias), grad = ctx.saved_tensors, ctx.weights, grads[0]
        decay, rate = _decay(a_log, dt_bias), a_log.tensor.exp()
        exponent = -(grad.to(decay.dtype) * x * decay).sum((0, 1))  # gradient of exp(a_log) · softplus(dt_bias)
        a_log.accumulate(exponent * rate * softplus(dt_bias.tensor))
        dt_bias.accumulate(exponent * rate * dt_bias.tensor.sigmoid())
        return (grad * decay).to(x.dtype), None, None


def _decay(a_log: Weight, dt_bias: Weight) -> Tensor:
    return (-a_log.tensor.exp() * softplus(dt_bias.tensor)).exp()


class DecayingConvolution(ShortConvolution):
    def __init__(self, block: BlockSpec, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions):
        super().__init__(block, weights, mesh, options)
        self.a_log, self.dt_bias = weights[f"{block.name}.a_log"], weights[f"{block.name}.dt_bias"]

    def mix(self, packed: Tensor, first: Tensor | None) -> Tensor:
        out: Tensor = _Decay.apply(super().mix(packed, first), self.a_log, self.dt_bias)
        return out


class DecayingConvolutionKind(ShortConvolutionKind):
    name = KIND

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        width = (build.model.hidden_size,)
        a_log = Segment(f"{block.name}.a_log", width, 0, decay=False, initial=LogUniform())
        dt_bias = Segment(f"{block.name}.dt_bias", width, 0, decay=False, initial=InverseSoftplus())
        return super().specs(build, block) + one_each(build.unit, a_log, dt_bias, at_least_fp32=True)

    def make(
        self, model: ModelConfig, block: BlockSpec, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
    ) -> DecayingConvolution:
        return DecayingConvolution(block, weights, mesh, options)


def _known(job: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The job on a rank that knows the kind; its result has the dtypes that forwards have seen."""

    def run(*args: Any) -> dict[str, Any]:
        register(DecayingConvolutionKind())
        SEEN.clear()
        return {**job(*args), "seen": sorted(SEEN)}

    run.__qualname__ = run.__name__ = job.__name__
    return run


train = _known(jobs.train)
train_and_save, resume = _known(jobs_training.train_and_save), _known(jobs_training.resume)
