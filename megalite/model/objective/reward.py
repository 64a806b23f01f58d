"""The head of a reward model and its loss, which the last stage computes.

    R_s = w · norm(x) at the last token of sequence s
    d loss = Σ_s ∂loss/∂R_s dR_s

Each rank computes the rewards of its own tokens. Communication: one all-reduce of [sequences] numbers over
cp, and one over tp with sequence parallelism. Every rank then computes the same loss and differentiates its
own rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.model.forward_state import ForwardState
from megalite.model.layer import make_norm
from megalite.model.layer_options import LayerOptions
from megalite.model.objective.counting import scores_of, sequences_of
from megalite.model.objective.losses import ObjectiveLosses
from megalite.objectives.objective import Objective, Scores
from megalite.parallel.collectives import all_reduce
from megalite.parallel.microbatch import IGNORE_INDEX, Microbatch
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weights


class RewardLosses(ObjectiveLosses):
    """Losses under an objective that reads rewards: the final norm, the head, and the objective.

    Args:
        weights: with `norm.weight` and `score.weight`, [1, hidden].
    """

    def __init__(
        self, model: ModelConfig, weights: Weights, mesh: Mesh, options: LayerOptions, objective: Objective
    ):
        super().__init__(objective, mesh)
        self.norm = make_norm(model, weights, "norm", options.ops)
        alone = MeshAxis("alone", 0, 1, (mesh.rank,))
        self.project = ColumnParallelLinear(weights["score.weight"], None, alone, False)
        self.splits_sequence = options.sequence_parallel and mesh.tp.size > 1

    def losses(self, x: Tensor, microbatch: Microbatch, state: ForwardState) -> tuple[Tensor, Tensor]:
        sequences = sequences_of(microbatch)
        own = self._own_rewards(x, microbatch)  # [sequences]
        rewards = own.detach()
        for axis in (self.mesh.cp, self.mesh.tp) if self.splits_sequence else (self.mesh.cp,):
            rewards = all_reduce(rewards, axis).wait()

        def scores(values: Tensor) -> Scores:
            return scores_of(sequences, values.new_zeros(2, len(values)))._replace(reward=values)

        loss, slopes = self.evaluate(rewards, scores, sequences.factors, state)
        return self.reported(loss), (own * slopes).sum() if torch.is_grad_enabled() else self.reported(loss)

    def _own_rewards(self, x: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the rewards of the sequences whose last tokens are on this rank, and 0 for others.

        Returns: [sequences] fp64. The last token of a sequence is the one without a target.
        """
        sequences = sequences_of(microbatch)
        index, last = sequences.index, microbatch.targets == IGNORE_INDEX
        # padding, which has no targets either, and other tokens are summed past the end
        place = torch.where(last & (index >= 0), index, sequences.count)  # [seq, batch]
        if self.splits_sequence:
            place = place.chunk(self.mesh.tp.size)[self.mesh.tp.rank]
        values = self.project(self.norm(x)).squeeze(-1)  # [seq (/tp), batch]
        sums = torch.zeros(sequences.count + 1, dtype=torch.float64, device=values.device)
        return sums.index_add(0, place.flatten(), values.double().flatten())[:-1]
