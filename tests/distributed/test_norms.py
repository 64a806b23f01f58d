"""Norms without weights, of the embedding and after the rotation, and xIELU: every layout against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_equivalence import assert_trains_like_one_process
from tests.support.configs import write_tokens
from tests.support.jobs_experts import BASE

STEPS = 2
XIELU = {"hidden_act": "xielu", "gated_mlp": False}
AFTER = {"embedding_norm": True, "qk_norm": "head", "qk_norm_after_rope": True, "initializer_range": 0.2}
BARE = AFTER | {"norm_weight": False, "qk_norm_weight": False}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # layout, model
    "tp 2, split sequence, zb-v, weights": (
        {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-v"},
        AFTER | XIELU,
    ),
    "zero 3, tp 4, copied keys": ({"tp": 4, "dp": 2, "zero": 3}, AFTER | XIELU | {"norm": "layer"}),
    "a ring, full width, operations recomputed": (
        {"cp": 2, "context": "ring", "recompute": "qkv+mlp_in+mlp_out+residual"},
        AFTER | XIELU | {"qk_norm": "full"},
    ),
    "ulysses, tp 2, recomputed, gates": (
        {"cp": 2, "context": "ulysses", "tp": 2, "sequence_parallel": True, "recompute": "full"},
        BARE | {"attention_gate": True},
    ),
    "parallel blocks, bare LayerNorm, operations recomputed": (
        {"tp": 2, "recompute": "attn_norm+mlp_norm+qkv"},
        BARE | {"parallel_block": "two_norms", "norm": "layer", "norm_bias": False},
    ),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    layout, model = LAYOUTS[name]
    assert_trains_like_one_process(ranks, references, {**BASE, **layout}, prefix, model, STEPS)
