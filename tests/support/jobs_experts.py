"""Configurations of mixtures of experts, and jobs that run them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.config.load import from_dict
from megalite.model.blocks.mixture.block import MixtureOfExperts
from megalite.model.forward_state import ForwardState
from megalite.parallel.expert.choice import ExpertChoice
from megalite.parallel.expert.dispatch import exchange
from tests.support import jobs
from tests.support.configs import case_of, config_of, config_of_one_process
from tests.support.jobs import make_trainer, mesh_of

MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "mlp_only_layers": [1],
    "router_aux_loss_coef": 0.02,
    "router_z_loss_coef": 0.01,
    "initializer_range": 0.2,  # router probabilities that differ
}
BALANCE = {
    "global": {"router_balance": "global"},
    "sequence": {"router_balance": "sequence"},
    "bias": {"router_balance": "bias", "router_aux_loss_coef": 0.0, "router_bias_rate": 0.01},
    "bias_loss": {"router_balance": "bias", "router_bias_rate": 0.01},
}
BASE = case_of(tied=False, kv_heads=2, vocab_size=96, layers=4, masked=True, dropout=0.0, precision="fp64")
BASE |= {"microbatches": 4, "ep": 1, "balance": "global", "dispatch": "all_to_all", "dp_shard": None}


def configs(prefix: str, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    case = {**BASE, "sequence_parallel": layout.get("tp", 1) > 1, **layout}
    model = MIXTURE | BALANCE[case["balance"]] | case.get("model", {})
    one = config_of_one_process(case, prefix)
    several = config_of(case, prefix, case["precision"])
    several["parallel"] |= {"ep": case["ep"], "expert_dispatch": case["dispatch"], "dp_shard": case["dp_shard"]}
    for config in (one, several):
        config["model"] |= model
    return several, one


# step, layer, sample and position of each token, and its [tokens, experts]
Scores = tuple[list[tuple[int, int, int, int]], Tensor]


def train_recorded(context: Any, config: dict[str, Any], steps: int, replayed: Scores | None = None) -> dict[str, Any]:
    """`jobs.train`, recording the scores by which this rank chooses experts. replayed: scores to choose by instead."""
    recorded: dict[tuple[int, int, int, int], Tensor] = {}
    earlier = None if replayed is None else dict(zip(*replayed, strict=True))
    choose = MixtureOfExperts._choice

    def choosing(
        mixture: MixtureOfExperts, scores: Tensor, targets: Tensor | None, state: ForwardState
    ) -> ExpertChoice:
        length = len(scores) // len(state.samples)
        positions = state.positions.flatten().tolist()[length * mixture.part :][:length]
        keys = [
            (state.step, mixture.layer, sample, position) for position in positions for sample in state.samples.tolist()
        ]
        recorded.update(zip(keys, scores.detach().clone(), strict=True))
        return choose(
            mixture, scores if earlier is None else torch.stack([earlier[key] for key in keys]), targets, state
        )

    with patch.object(MixtureOfExperts, "_choice", choosing):
        return jobs.train(context, config, steps) | {"scores": (list(recorded), torch.stack([*recorded.values()]))}


def sent(context: Any, config: dict[str, Any]) -> int:
    """Bytes that this rank sends by all-to-all in one step."""
    trainer = make_trainer(context, config)
    trainer.mesh.traffic.clear()
    trainer.step()
    trainer.close()
    return trainer.mesh.traffic["all_to_all_bytes", "expert"]


def exchanged(context: Any, config: dict[str, Any], sizes: list[list[int]]) -> dict[str, Any]:
    """An exchange of sizes[source][target] rows with distinct values, and the gradient of Σ row · target, which goes
    back."""
    axis = mesh_of(context, from_dict(config)).expert
    send, receive = sizes[axis.rank], [row[axis.rank] for row in sizes]
    x = torch.arange(float(sum(send))).unsqueeze(1).repeat(1, 3) + 100 * axis.rank
    out = exchange(x, send, receive, axis)
    grad = exchange(torch.full_like(out, axis.rank + 1), receive, send, axis)
    return {"out": out[:, 0].tolist(), "grad": grad[:, 0].tolist()}
