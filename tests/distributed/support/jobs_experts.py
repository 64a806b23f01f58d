"""Configurations of mixtures of experts, and what the test ranks run with them."""

from __future__ import annotations

from typing import Any

from tests.distributed.support.configs import SINGLE, config_of, config_of_one_process

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
}
BASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 4, "masked": True, "dropout": 0.0, "precision": "fp64"}
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
