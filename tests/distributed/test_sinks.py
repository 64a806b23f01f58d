"""Attention sinks with windows in every second layer train the same on every layout as on one process: losses, norms and weights.

fp64, 4 steps, within 1e-9, with packed documents and dropout of attention; alone, and with what else gpt-oss has: routers and experts with
biases, its activation, biases of attention.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.support import jobs
from tests.distributed.support.configs import config_of, config_of_one_process, write_tokens
from tests.distributed.support.jobs_experts import BASE
from tests.distributed.test_equivalence import assert_same_run

STEPS = 4
MODEL = {"attention_sinks": True, "sliding_window": 5, "sliding_window_layers": [0, 2], "attention_dropout": 0.1, "initializer_range": 0.3}
OSS = {"num_experts": 4, "moe_intermediate_size": 24, "router_logit_bias": True, "mlp_bias": True, "hidden_act": "clamped_swiglu"}
OSS |= {"attention_bias": True, "attention_out_bias": True, "router_aux_loss_coef": 0.02}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, split sequence, dp 2, zero 3": {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 3},
    "cp 2, ring, recomputed": {"cp": 2, "context": "ring", "recompute": "full"},
    "cp 2, ulysses, tp 2, selective": {"cp": 2, "context": "ulysses", "tp": 2, "recompute": "selective"},
    "cp 4, ring of pairs": {"cp": 4, "context": "ring", "context_inner": 2},
    "cp 2, gather, pp 2, zb-v": {"cp": 2, "context": "gather", "pp": 2, "schedule": "zb-v"},
    "gpt-oss, tp 2, split sequence, ep 2, zero 1, recomputed": {
        **{"tp": 2, "sequence_parallel": True, "ep": 2, "dp": 2, "zero": 1, "recompute": "full"}
    },
    "gpt-oss, cp 2, ring, dp 2, ep 4, zero 3": {"cp": 2, "context": "ring", "dp": 2, "ep": 4, "zero": 3},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    case = {**BASE, **LAYOUTS[name]}
    one, several = config_of_one_process(case, prefix), config_of(case, prefix, "fp64")
    several["parallel"] |= {"ep": case["ep"], "context_inner": case.get("context_inner", 1)}
    for config in (one, several):
        config["model"] |= MODEL | (OSS if name.startswith("gpt-oss") else {})
    world = case["tp"] * case["pp"] * case["dp"] * case["cp"]
    expected = references.run(jobs.train, one, STEPS)
    assert_same_run(ranks.run(world, jobs.train, several, STEPS), expected, 1e-9, 1e-9)
