"""Latent attention and a router with groups train the same on every layout as on one process: losses, gradient norms and weights.

fp64, 3 steps, within 1e-9. The dense model packs documents and has no latent of queries; the other is a small DeepSeek-V3, with the loss by
sequence next to the moving bias.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.support import jobs, jobs_lora
from tests.distributed.support.configs import config_of, config_of_one_process, write_tokens
from tests.distributed.support.jobs_experts import BASE, MIXTURE
from tests.distributed.test_equivalence import assert_same_run

STEPS = 3
LATENTS = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": None}
SCALED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4,
    "beta_slow": 1,
    "attention_factor": 1.1,
}
V3 = MIXTURE | LATENTS | {"q_lora_rank": 16, "router_scores": "sigmoid", "num_experts": 8, "n_group": 4, "topk_group": 2}
V3 |= {"routed_scaling_factor": 2.5, "shared_expert_gate": False, "router_balance": "bias", "router_aux_loss_coef": 0.02}
V3 |= {"router_bias_rate": 0.01, "attention_scale": 0.5, "rope_scaling": SCALED}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense, tp 2, dp 2, zero 3": {"tp": 2, "dp": 2, "zero": 3},
    "dense, cp 2, ulysses, tp 2, split sequence": {"cp": 2, "context": "ulysses", "tp": 2, "sequence_parallel": True},
    "dense, cp 2, ring, recomputed": {"cp": 2, "context": "ring", "recompute": "full"},
    "v3, tp 2, ep 2, recomputed": {"tp": 2, "ep": 2, "recompute": "full"},
    "v3, pp 2, tp 2, ep 2, zb-v": {"pp": 2, "tp": 2, "ep": 2, "zero": 1, "schedule": "zb-v"},
    "v3, cp 2, gather, dp 2, ep 4, zero 3": {"cp": 2, "context": "gather", "dp": 2, "ep": 4, "zero": 3},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configs(prefix: str, dense: bool, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    case = {**BASE, "sequence_parallel": not dense and layout.get("tp", 1) > 1, **layout}
    one, several = config_of_one_process(case, prefix), config_of(case, prefix, "fp64")
    several["parallel"] |= {"ep": case["ep"]}
    for config in (one, several):
        config["model"] |= LATENTS if dense else V3
    return several, one


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    layout = LAYOUTS[name]
    several, one = configs(prefix, name.startswith("dense"), **layout)
    world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1) * layout.get("cp", 1)
    assert_same_run(ranks.run(world, jobs.train, several, STEPS), references.run(jobs.train, one, STEPS), 1e-9, 1e-9)


def test_adapters_on_latents_train_like_those_of_one_process(ranks, references, prefix):
    """With dropout, under a split sequence and a split backward: the matrices of latents are whole on each rank, the others split."""

    def config(**layout: Any) -> dict[str, Any]:
        lora = {"rank": 3, "alpha": 8.0, "dropout": 0.1, "dora": True}
        made = config_of({**BASE, **layout}, prefix, "fp64", lora=lora, optimizer={"lr": 3e-3})
        made["model"] |= LATENTS | {"q_lora_rank": 16}
        return made

    expected = references.run(jobs_lora.train, config(microbatches=1), STEPS)
    for rank in ranks.run(2, jobs_lora.train, config(tp=2, sequence_parallel=True, schedule="zb-h1", microbatches=2), STEPS):
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-9, abs=0)
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-9, abs=0)
