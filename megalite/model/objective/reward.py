"""The head of a reward model and its loss, which the last stage computes.

    R_s = w · norm(x) at the last token of sequence s
    d loss = Σ_s ∂loss/∂R_s dR_s

Communication: one all-reduce of [sequences] numbers over cp, and one over tp with sequence parallelism. Every
rank then computes the same loss, and weighs the outputs of its own tokens with its derivatives: the
all-reduces have no backward.
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
        sequences, place = sequences_of(microbatch), self._places(microbatch)
        values = self.project(self.norm(x)).squeeze(-1)  # [seq (/tp), batch]
        sums = torch.zeros(sequences.count + 1, dtype=torch.float64, device=values.device)
        rewards = sums.index_add(0, place.flatten(), values.detach().double().flatten())[:-1]  # [sequences]
        for axis in (self.mesh.cp, self.mesh.tp) if self.splits_sequence else (self.mesh.cp,):
            rewards = all_reduce(rewards, axis).wait()

        def scores(rewards: Tensor) -> Scores:
            return scores_of(sequences, rewards.new_zeros(2, len(rewards)))._replace(reward=rewards)

        loss, slopes = self.evaluate(rewards, scores, sequences.factors, state)
        if not torch.is_grad_enabled():
            return self.reported(loss), self.reported(loss)
        weights = torch.cat([slopes, slopes.new_zeros(1)])[place].to(values.dtype)
        return self.reported(loss), (values * weights).sum()

    def _places(self, microbatch: Microbatch) -> Tensor:
        """Return the sequence that ends with each token of this rank, and their number for other tokens.

        The last token of a sequence has no target.

        Returns:
            [seq (/tp), batch].
        """
        sequences, last = sequences_of(microbatch), microbatch.targets == IGNORE_INDEX
        index = torch.where(sequences.index < 0, sequences.count, sequences.index)  # padding has none either
        place = torch.where(last, index, sequences.count)
        return place.chunk(self.mesh.tp.size)[self.mesh.tp.rank] if self.splits_sequence else place
