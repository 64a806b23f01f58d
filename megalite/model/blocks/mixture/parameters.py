"""The stored parameters of a mixture of experts: router, experts and the shared expert.

The experts of a layer are two stored tensors, expert after expert: `experts.in` [experts · (2 ·) width,
hidden], in each expert its gate, then its up; `experts.down` [experts · hidden, width]. An expert is whole on
its ranks. With `moe_latent_size` experts have this width in place of hidden, and `latent_in` [latent, hidden]
and `latent_out` [hidden, latent] are whole on each tp rank.
"""

from __future__ import annotations

from functools import partial

from megalite.config.sections.model import ModelConfig
from megalite.model.blocks.feed_forward import parameters as feed_forward
from megalite.model.spec_builder import SpecBuilder, one_each
from megalite.parallel.spec import ParamSpec, Segment


def specs(build: SpecBuilder, name: str) -> list[ParamSpec]:
    """Return the router [experts, hidden], the latent, the experts, and the shared expert."""
    model, experts = build.model, build.model.num_experts or 0
    stored = build.whole(f"{name}.router.weight", experts)
    if model.router_logit_bias:
        axis = build.partial_axis
        bias = Segment(
            f"{name}.router.bias", (experts,), grad_partial_axis=axis, decay=False, init_std=build.std
        )
        stored += one_each(build.unit, bias)
    if model.moe_latent_size:
        stored += build.whole(f"{name}.latent_in.weight", model.moe_latent_size)
        shape, axis = (model.hidden_size, model.moe_latent_size), build.partial_axis
        back = Segment(f"{name}.latent_out.weight", shape, grad_partial_axis=axis, init_std=build.out_std)
        stored += one_each(build.unit, back)
    stored += _experts(build, f"{name}.experts")
    if model.shared_expert_intermediate_size:
        stored += feed_forward.specs(build, f"{name}.shared", model.shared_expert_intermediate_size)
        if model.shared_expert_gate:
            stored += build.whole(f"{name}.shared_gate.weight", 1)
    return stored


def _experts(build: SpecBuilder, name: str) -> list[ParamSpec]:
    model, hidden, experts = build.model, build.model.expert_input, build.model.num_experts or 0
    fused, width = 2 if model.gated_mlp else 1, model.expert_width
    stacked = partial(Segment, split=0, axis="expert", experts=experts)
    into, down = (experts * fused * width, hidden), (experts * hidden, width)
    segments = [
        stacked(f"{name}.in.weight", into, init_std=build.std, role="experts.in", fused=fused),
        stacked(f"{name}.down.weight", down, init_std=build.out_std, role="experts.down"),
    ]
    if model.mlp_bias:
        segments.append(stacked(f"{name}.in.bias", into[:1], decay=False))
        segments.append(stacked(f"{name}.down.bias", down[:1], decay=False))
    return [ParamSpec(segment.name, build.unit, (segment,), domain="expert") for segment in segments]


def idle_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of the experts that do not process a given token."""
    idle = max((model.num_experts or 0) - model.num_experts_per_tok, 0)
    fused = 2 if model.gated_mlp else 1
    expert = (fused + 1) * model.expert_input * model.expert_width
    if model.mlp_bias:
        expert += model.expert_input + fused * model.expert_width
    return idle * expert
