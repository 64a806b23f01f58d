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
from megalite.parallel.tensor.linear import Activation, ColumnParallelLinear
from megalite.parallel.weight import Weights


class MixtureOfExperts(BlockModule):
    """[seq (/tp), batch, hidden] -> the same shape, as `FeedForward`. With tp > 1 the sequence is split."""

    def __init__(
        self, model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        name, layer = block.name, block.layer
        weight_in = weights[f"{name}.experts.in.weight"]
        self.model, self.layer = model, layer
        # the forward that backward runs again must repeat the choice of experts
        self.keeps_choice = options.recompute == "full" or options.recomputes("experts")
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

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        rows = x.flatten(0, 1)  # [tokens, hidden] of this rank
        logits = self.router(rows)  # [tokens, experts], at least fp32
        sigmoid, targets = self.model.router_scores == "sigmoid", state.targets
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        if targets is not None:
            targets = targets.narrow(0, x.shape[0] * self.part, x.shape[0])
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
        # before the host waits for the sizes of the dispatch
        shared = None if self.shared is None else self._shared(x, rows, state)
        if self.latent_in is not None:
            rows = self.latent_in(rows)
        out = self.dispatch.run(rows, weights, choice, self.experts)
        out = (out if self.latent_out is None else self.latent_out(out)).view_as(x)
        return out if shared is None else out + shared

    def operations(self) -> Mapping[str, Operation]:
        return {"experts": self}

    def _record(self, state: ForwardState, statistics: Tensor) -> None:
        """Record the layer's statistics in the tensor of all layers, [layers, experts + 3]."""
        if "router" not in state.statistics:
            state.statistics["router"] = statistics.new_zeros(layer_count(self.model), len(statistics))
        state.statistics["router"][self.layer] = statistics

    def _choice(self, scores: Tensor, targets: Tensor | None, state: ForwardState) -> ExpertChoice:
        """Return the choice of this forward, in training without the rows that exceed the capacity.

        Recomputation repeats the choice of the first forward: another one would change shapes.
        """
        first = state.choices.pop(self.layer, None)
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
        if self.keeps_choice and state.training:
            state.choices[self.layer] = choice
        return choice

    def _shared(self, x: Tensor, rows: Tensor, state: ForwardState) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(x, state)
        if self.shared_gate is None:
            return out
        return out * self.shared_gate(rows).sigmoid().to(x.dtype).view(*x.shape[:-1], 1)


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> MixtureOfExperts:
    """Return the module of a block, see `BlockKind.make`."""
    return MixtureOfExperts(model, block, weights, mesh, options)
