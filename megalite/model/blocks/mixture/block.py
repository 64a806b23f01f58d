"""Mixture of experts (MoE) in place of the dense feed-forward: the router chooses k experts for each token.

    p = softmax(router(x))
    y = Σ over the k largest p_e of w_e · expert_e(x)  +  gate(x) · shared(x)

With `router_scores: sigmoid` p is the sigmoid of the logits; with groups the k are chosen within the token's
best groups (DeepSeek-V3). With `moe_latent_size` the experts read and write a latent of each token:

    y = W₂ (Σ w_e · expert_e(W₁ x))  +  gate(x) · shared(x)

Communicates in dispatch and combine over the expert axis, in the auxiliary losses, and in the shared expert's
linears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.block_kind import BlockSpec
from megalite.model.block_module import BlockModule, Operation
from megalite.model.blocks.feed_forward.block import FeedForward
from megalite.model.blocks.mixture.balance import Balance, RouterState
from megalite.model.blocks.mixture.router import Router, choose, in_best_groups
from megalite.model.forward_state import ForwardState
from megalite.model.layer_options import LayerOptions
from megalite.model.mtp.losses import layer_count
from megalite.parallel.expert.choice import ExpertChoice
from megalite.parallel.expert.dispatch import make_dispatch
from megalite.parallel.expert.grouped_matmul import Experts
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.node import Node, Saved
from megalite.parallel.tensor.linear import Activation, ColumnParallelLinear
from megalite.parallel.weight import Weights


class _Start(torch.autograd.Function):
    """Returns x as the start of a graph, which does not hold x as it would a leaf: recomputation can drop it.

    `anchor` makes the output require a gradient. Gradients are those of the output: no backward runs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.view_as(x)


class MixtureOfExperts(BlockModule):
    """[seq (/tp), batch, hidden] -> the same shape, as `FeedForward`. With tp > 1 the sequence is split."""

    def __init__(
        self, model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        name, layer = block.name, block.layer
        weight_in = weights[f"{name}.experts.in.weight"]
        self.model, self.layer = model, layer
        # the index of this rank's part of the sequence
        self.part = mesh.tp.rank if options.sequence_parallel else 0
        self.router = Router(weights[f"{name}.router.weight"], weights.get(f"{name}.router.bias"))
        local_experts = (model.num_experts or 0) // mesh.expert.size
        activation = Activation(model.hidden_act, model.gated_mlp, options.ops)
        biases = weights.get(f"{name}.experts.in.bias"), weights.get(f"{name}.experts.down.bias")
        down = weights[f"{name}.experts.down.weight"]
        self.experts = Experts(weight_in, down, biases, local_experts, activation)
        self.latent_in = self.latent_out = None
        if model.moe_latent_size:
            alone = MeshAxis("alone", 0, 1, (mesh.rank,))  # whole on each rank: no communication
            self.latent_in, self.latent_out = (
                ColumnParallelLinear(weights[f"{name}.latent_{end}.weight"], None, alone, False)
                for end in ("in", "out")
            )
        same_rows = mesh.tp.size > 1 and not options.sequence_parallel  # in inference
        dispatch = "same_rows" if same_rows else options.expert_dispatch
        self.dispatch = make_dispatch(dispatch, mesh.expert, mesh.sequence.size)
        self.balance = Balance(model, RouterState.start(model, weight_in.tensor.device), mesh.sequence)
        self.capacity = None
        if model.expert_capacity_factor is not None:
            from megalite.model.blocks.mixture.capacity import Capacity

            self.capacity = Capacity(model.expert_capacity_factor, mesh.sequence, mesh.tp.size)
        self.shared = self.shared_gate = None
        if model.shared_expert_intermediate_size:
            self.shared = FeedForward(model, layer, f"{name}.shared", weights, mesh, options)
            gate = weights.get(f"{name}.shared_gate.weight")
            self.shared_gate = Router(gate) if gate is not None else None
        own = (weight for key, weight in weights.items() if key.startswith(f"{name}."))
        self.trained = next((weight for weight in own if weight.trainable), None)

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        return Node.apply(x, None if self.trained is None else self.trained.tensor, self, state)

    @property
    def differentiates(self) -> bool:
        return True

    def compute(self, x: Tensor, saved: Saved, state: ForwardState, residual: Tensor | None = None) -> Tensor:
        rows = x.flatten(0, 1)  # [tokens, hidden] of this rank
        logits = self.router.compute(rows, saved)  # [tokens, experts], at least fp32
        # The weights of the experts and the losses of the router are small: autograd differentiates them.
        with torch.set_grad_enabled(state.training):
            logits = _Start.apply(logits, logits.new_empty(0).requires_grad_(state.training))
            weights, choice = self._weights(logits, x.shape[0], state)
        saved.append((logits, weights))
        # before the host waits for the sizes of the dispatch
        shared = None if self.shared is None else self._shared(x, rows, saved, state)
        if self.latent_in is not None:
            rows = self.latent_in.compute(rows, saved)
        out = self.dispatch.compute(rows, weights.detach(), saved, choice, self.experts)
        if self.latent_out is not None:
            out = self.latent_out.compute(out, saved)
        out = out.view_as(x)
        for added in (shared, residual):
            out = out if added is None else out.add_(added)
        return out

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        drows, choice = grad.flatten(0, 1), state.choices.pop(self.layer)
        if self.latent_out is not None:
            drows = self.latent_out.gradient(drows, saved)
        drows, dweights = self.dispatch.gradient(drows, saved, choice, self.experts)
        if self.latent_in is not None:
            drows = self.latent_in.gradient(drows, saved)
        dx = None if self.shared is None else self._shared_gradient(grad, drows, saved, state)
        logits, weights = saved.pop()
        (dlogits,) = torch.autograd.grad(weights, logits, dweights)
        drows = drows.add_(self.router.gradient(dlogits, saved)).view_as(grad)
        return drows if dx is None else dx.add_(drows)

    def _weights(self, logits: Tensor, length: int, state: ForwardState) -> tuple[Tensor, ExpertChoice]:
        """Return the weights of the chosen experts, [tokens, k], and the choice, whose dispatch is started.

        The backward of the weights adds the losses of the router.

        Args:
            length: number of positions of this rank.
        """
        sigmoid, targets = self.model.router_scores == "sigmoid", state.targets
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        if targets is not None:
            targets = targets.narrow(0, length * self.part, length)
        choice = self._choice(scores, targets, state)
        self.dispatch.begin(choice)
        weights = scores.gather(1, choice.experts)  # [tokens, k]
        if self.model.norm_topk_prob:
            # sigmoid scores may all be 0
            total = weights.sum(-1, keepdim=True) + self.model.norm_topk_eps
            if self.model.norm_topk_min is not None:
                total = total.clamp(min=self.model.norm_topk_min)
            weights = weights / total
        if self.model.routed_scaling_factor != 1.0:
            weights = weights * self.model.routed_scaling_factor
        if state.training and targets is not None:
            probabilities = scores / scores.sum(-1, keepdim=True) if sigmoid else scores
            weights, statistics = self.balance.with_losses(
                weights, logits, probabilities, choice, targets, state.loss_scale
            )
            self._record(state, statistics)
        return weights, choice

    def operations(self) -> Mapping[str, Operation]:
        return {"experts": self}

    def _record(self, state: ForwardState, statistics: Tensor) -> None:
        """Record the layer's statistics in the tensor of all layers, [layers, experts + 3]."""
        if "router" not in state.statistics:
            state.statistics["router"] = statistics.new_zeros(layer_count(self.model), len(statistics))
        state.statistics["router"][self.layer] = statistics

    def _choice(self, scores: Tensor, targets: Tensor | None, state: ForwardState) -> ExpertChoice:
        """Return the choice of this forward, in training without the rows that exceed the capacity.

        The state has it for the backward, and for recomputation: another choice would change shapes.
        """
        first = state.choices.get(self.layer)
        if first is not None:
            return first
        model = self.model
        if model.biased_choice:
            scores = scores + self.balance.state.bias.to(scores.dtype)
        if model.n_group is not None:
            scores = in_best_groups(scores, model.n_group, model.topk_group, model.counted_in_group)
        choice = choose(scores, model.num_experts_per_tok)
        if self.capacity is not None and state.training and targets is not None:
            choice = self.capacity.limit(choice, targets != IGNORE_INDEX, state.part)
        if state.training:
            state.choices[self.layer] = choice
        return choice

    def _shared(self, x: Tensor, rows: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        assert self.shared is not None
        out = self.shared.compute(x, saved, state)
        if self.shared_gate is None:
            return out
        gate = self.shared_gate.compute(rows, saved).sigmoid()  # [tokens, 1]
        saved.append((out, gate))
        return out * _factors(gate, out)

    def _shared_gradient(self, grad: Tensor, drows: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        """Return the gradient of x through the shared expert; that through its gate is added to `drows`."""
        assert self.shared is not None
        if self.shared_gate is not None:
            out, gate = saved.pop()
            dfactors = (grad * out).sum(-1, keepdim=True).flatten(0, 1).to(gate.dtype)
            drows.add_(self.shared_gate.gradient(torch.ops.aten.sigmoid_backward(dfactors, gate), saved))
            grad = grad * _factors(gate, out)
        return self.shared.gradient(grad, saved, state)


def _factors(gate: Tensor, out: Tensor) -> Tensor:
    """Return a gate, [tokens, 1], as factors on [seq, batch, hidden]."""
    return gate.to(out.dtype).view(*out.shape[:-1], 1)


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> MixtureOfExperts:
    """Return the module of a block, see `BlockKind.make`."""
    return MixtureOfExperts(model, block, weights, mesh, options)
