"""One transformer layer.

The model is written once. What varies between families (norm kind and placement, biases, gating, positions)
is decided in `__init__` from the fields of `ModelConfig`; `forward` has no conditions on parallelism.
Communicates only in the linears (`parallel.tensor.linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.attention import Attention
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.model.layer_options import LayerOptions
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.tensor.linear import Activation, ColumnParallelLinear, RowParallelLinear
from megalite.parallel.tensor.norm import LayerNorm, RMSNorm, add_and_norm
from megalite.parallel.weight import Weight


def make_norm(model: ModelConfig, weights: Mapping[str, Weight], name: str, ops: CompiledOps) -> nn.Module:
    if model.norm == "rms":
        return RMSNorm(weights[f"{name}.weight"], model.rms_norm_eps, model.norm_offset, ops)
    return LayerNorm(
        weights[f"{name}.weight"], weights.get(f"{name}.bias"), model.rms_norm_eps, model.norm_offset, ops
    )


class Scale(nn.Module):
    """Computes x · factor."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class FeedForward(nn.Module):
    """down(act(gate) · up), or down(act(up)): [seq (/tp), batch, hidden] -> the same shape.

    `up` is column-parallel and has gate and up packed. `down` is row-parallel and applies the activation to
    its input, so that the output of the activation is not kept for backward.
    """

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        weights: Mapping[str, Weight],
        mesh: Mesh,
        options: LayerOptions,
        part: str = "mlp",
    ):
        super().__init__()
        name = f"layers.{layer}.{part}"
        self.layer, tp, sequence_parallel = layer, mesh.tp, options.sequence_parallel
        activation = Activation(model.hidden_act, model.gated_mlp, options.ops)
        weight, bias = weights[f"{name}.in.weight"], weights.get(f"{name}.in.bias")
        self.up = ColumnParallelLinear(weight, bias, tp, sequence_parallel)
        weight, bias = weights[f"{name}.down.weight"], weights.get(f"{name}.down.bias")
        self.down = RowParallelLinear(weight, bias, tp, sequence_parallel, activation)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        # [seq, batch, (2 ·) intermediate/tp]
        inner = self.up(x, state.adapter_mask(Site.UP_ADAPTER, self.layer))
        return self.down(inner, state.adapter_mask(Site.DOWN_ADAPTER, self.layer))


def make_attention(
    model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
) -> Attention:
    if model.kv_lora_rank is None and not model.attention_sinks:
        return Attention(model, layer, weights, mesh, options)
    from megalite.model.attention_sinks import SinkAttention
    from megalite.model.latent_attention import LatentAttention

    kind = SinkAttention if model.attention_sinks else LatentAttention
    return kind(model, layer, weights, mesh, options)


def make_feed_forward(
    model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
) -> nn.Module:
    if not model.is_mixture(layer):
        return FeedForward(model, layer, weights, mesh, options)
    from megalite.model.moe import MixtureOfExperts

    return MixtureOfExperts(model, layer, weights, mesh, options)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [seq (/tp), batch, hidden] -> the same shape.

    `norm_placement` decides whether norms are in front of attention and mlp (pre), behind them (post), or
    both.
    """

    def __init__(
        self, model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        name = f"layers.{layer}"
        before = model.norm_placement != "post"
        two_norms = before and model.parallel_block != "shared_norm"

        def norm(part: str, present: bool) -> nn.Module:
            return make_norm(model, weights, f"{name}.{part}", options.ops) if present else nn.Identity()

        def output(part: str) -> nn.Module:  # applied to a block's output before the residual addition
            modules = [norm(part, model.norm_placement != "pre")]
            if model.residual_multiplier != 1.0:
                modules.append(Scale(model.residual_multiplier))
            return nn.Sequential(*modules)

        self.attention = make_attention(model, layer, weights, mesh, options)
        self.mlp = make_feed_forward(model, layer, weights, mesh, options)
        self.attention_input_norm = norm("input_norm", before)
        self.attention_output = output("attention.output_norm")
        self.mlp_input_norm = norm("mlp_norm", two_norms)
        self.mlp_output = output("mlp.output_norm")
        probability, sequence_parallel = model.residual_dropout, options.sequence_parallel
        self.attention_dropout = Dropout(
            probability, Site.ATTENTION_OUTPUT, layer, mesh.tp, sequence_parallel
        )
        self.mlp_dropout = Dropout(probability, Site.MLP_OUTPUT, layer, mesh.tp, sequence_parallel)
        # `compute` under activation checkpointing
        self.recomputed: Callable[[Tensor, ForwardState], Tensor] | None = None

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        run = self.compute if self.recomputed is None or not torch.is_grad_enabled() else self.recomputed
        return run(x, state)

    def compute(self, x: Tensor, state: ForwardState) -> Tensor:
        """Computes the layer without recomputation."""
        attended = self.attention(self.attention_input_norm(x), state)
        x, normed = self.join(x, attended, state)
        transformed = self.mlp(normed, state)
        return x + self.mlp_dropout(self.mlp_output(transformed), state)

    def join(self, x: Tensor, attended: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Returns the residual sum after attention, and its norm: fused for RMSNorm, one pass over memory."""
        branch = self.attention_dropout(self.attention_output(attended), state)
        return add_and_norm(x, branch, self.mlp_input_norm)


class ParallelLayer(Layer):
    """x + attention(norm(x)) + mlp(norm(x)): both read the layer's input. With a shared norm `mlp_input_norm`
    is the identity."""

    def __init__(
        self, model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
    ):
        super().__init__(model, layer, weights, mesh, options)
        self.shared_norm = model.parallel_block == "shared_norm"

    def compute(self, x: Tensor, state: ForwardState) -> Tensor:
        normed = self.attention_input_norm(x)
        attended = self.attention_dropout(self.attention_output(self.attention(normed, state)), state)
        transformed = self.mlp(normed if self.shared_norm else self.mlp_input_norm(x), state)
        return x + attended + self.mlp_dropout(self.mlp_output(transformed), state)


def make_layer(
    model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
) -> Layer:
    kind = Layer if model.parallel_block == "none" else ParallelLayer
    module = kind(model, layer, weights, mesh, options)
    if options.recompute not in ("none", "selective"):
        from megalite.model.recomputation import recomputing

        exchanged = mesh.cp.size > 1 and options.context == "ulysses"
        module.recomputed = recomputing(module, options.recompute, exchanged)
    return module
