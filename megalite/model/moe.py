"""A mixture of experts in place of the dense feed-forward: each token is processed by the k experts that its
router chooses.

    logits = router(x);  p = softmax(logits);  y = Σ over the k largest p_e of  w_e · expert_e(x)  +  gate(x)
    · shared(x)

With `router_scores: sigmoid` p is the sigmoid of the logits; with groups the k are chosen within the token's
best groups (DeepSeek-V3).

Communication: that of the dispatch over the expert axis, of the balance, and of the shared expert's linears.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megalite.config.schema import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.forward_state import ForwardState
from megalite.model.layer_options import LayerOptions
from megalite.model.parameters import layer_count
from megalite.model.transformer import FeedForward
from megalite.parallel.expert.balance import Balance, RouterState
from megalite.parallel.expert.choice import ExpertChoice, choose, in_best_groups
from megalite.parallel.expert.dispatch import make_dispatch
from megalite.parallel.expert.grouped_matmul import Experts
from megalite.parallel.expert.router import Router
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.tensor.linear import Activation
from megalite.parallel.weight import Weight

TINY = 1e-20  # sigmoid scores may all be 0; sums of probabilities are too large to be changed by it


class MixtureOfExperts(nn.Module):
    """[seq (/tp), batch, hidden] -> the same shape, as `FeedForward`. With tp > 1 the sequence is split."""

    def __init__(
        self, model: ModelConfig, layer: int, weights: Mapping[str, Weight], mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        name = f"layers.{layer}.mlp"
        into = weights[f"{name}.experts.in.weight"]
        self.model, self.layer, self.keeps_choice = model, layer, options.recompute == "full"
        # which part of the sequence this rank has
        self.part = mesh.tp.rank if options.sequence_parallel else 0
        self.router = Router(weights[f"{name}.router.weight"], weights.get(f"{name}.router.bias"))
        own = (model.num_experts or 0) // mesh.expert.size
        activation = Activation(model.hidden_act, model.gated_mlp, options.ops)
        biases = weights.get(f"{name}.experts.in.bias"), weights.get(f"{name}.experts.down.bias")
        self.experts = Experts(into, weights[f"{name}.experts.down.weight"], biases, own, activation)
        alike = mesh.tp.size > 1 and not options.sequence_parallel  # in inference
        self.dispatch = make_dispatch("same_rows" if alike else options.expert_dispatch, mesh.expert)
        self.balance = Balance(model, RouterState.start(model, into.tensor.device), mesh.sequence)
        self.capacity = None
        if model.expert_capacity_factor is not None:
            from megalite.parallel.expert.capacity import Capacity

            self.capacity = Capacity(model.expert_capacity_factor, mesh.sequence, mesh.tp.size)
        self.shared = self.shared_gate = None
        if model.shared_expert_intermediate_size:
            self.shared = FeedForward(model, layer, weights, mesh, options, "mlp.shared")
            gate = weights.get(f"{name}.shared_gate.weight")
            self.shared_gate = Router(gate) if gate is not None else None

    def forward(self, x: Tensor, state: ForwardState) -> Tensor:
        rows = x.flatten(0, 1)  # [tokens, hidden] of this rank
        logits = self.router(rows)  # [tokens, experts], at least fp32
        scores = logits.sigmoid() if self.model.router_scores == "sigmoid" else logits.softmax(-1)
        targets = (
            None if state.targets is None else state.targets.narrow(0, x.shape[0] * self.part, x.shape[0])
        )
        choice = self._choice(scores, targets, state)
        self.dispatch.begin(choice)
        weights = scores.gather(1, choice.experts)  # [tokens, k]
        if self.model.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        if self.model.routed_scaling_factor != 1.0:
            weights = weights * self.model.routed_scaling_factor
        if state.training and targets is not None:
            probabilities = (
                scores / scores.sum(-1, keepdim=True) if self.model.router_scores == "sigmoid" else scores
            )
            weights, statistics = self.balance.with_losses(
                weights, logits, probabilities, choice, targets, state.loss_scale
            )
            self._report(state, statistics)
        # before the host waits for the sizes of the dispatch
        shared = None if self.shared is None else self._shared(x, rows, state)
        out = self.dispatch.run(rows, weights, choice, self.experts).view_as(x)
        return out if shared is None else out + shared

    def _report(self, state: ForwardState, statistics: Tensor) -> None:
        """Enter the layer's statistics into those of all layers, [layers, experts + 3]."""
        if "router" not in state.statistics:
            state.statistics["router"] = statistics.new_zeros(layer_count(self.model), len(statistics))
        state.statistics["router"][self.layer] = statistics

    def _choice(self, scores: Tensor, targets: Tensor | None, state: ForwardState) -> ExpertChoice:
        """The choice of this forward, in training without what exceeds the capacity. Recomputation uses that
        of the first forward: another one would change shapes."""
        if (kept := state.choices.pop(self.layer, None)) is not None:
            return kept
        model = self.model
        if model.biased_choice:
            scores = scores + self.balance.state.bias.to(scores.dtype)
        if model.n_group is not None:
            scores = in_best_groups(
                scores, model.n_group, model.topk_group, 2 if model.router_scores == "sigmoid" else 1
            )
        choice = choose(scores, model.num_experts_per_tok)
        if self.capacity is not None and state.training and targets is not None:
            choice = self.capacity.limit(choice, targets != IGNORE_INDEX, state.part)
        if self.keeps_choice and state.training:
            state.choices[self.layer] = choice
        return choice

    def _shared(self, x: Tensor, rows: Tensor, state: ForwardState) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(x, state)
        return (
            out
            if self.shared_gate is None
            else out * self.shared_gate(rows).sigmoid().to(x.dtype).view(*x.shape[:-1], 1)
        )
