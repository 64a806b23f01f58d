"""Attention of another shape in some layers: every layout against one process, and generation."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.generation.language_model import LanguageModel
from tests.distributed.test_equivalence import assert_trains_like_one_process
from tests.support import jobs_training
from tests.support.configs import SEQUENCE, config_of, write_tokens
from tests.support.jobs_experts import BASE
from tests.support.pool import RankContext

STEPS = 2
WINDOW = {"sliding_window": 5, "sliding_window_layers": [1, 2], "initializer_range": 0.2}
# more key-value heads, and sinks, in layers with a window; narrow values
LIKE_MIMO = WINDOW | {
    "num_key_value_heads": 1,
    "value_head_dim": 6,
    "local_attention": {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "rope_local_theta": 100.0,
    "attention_sinks": True,
    "sink_layers": [1, 2],
}
# numbers of heads by layer, and a gate of each head
LIKE_LAGUNA = WINDOW | {
    "layer_heads": [4, 8, 8, 4],
    "qk_norm": "head",
    "attention_gate": True,
    "attention_gate_act": "softplus",
    "attention_gate_width": "head",
}
# wide heads in the layers without a window; values of a third width
WIDE = WINDOW | {
    "num_key_value_heads": 2,
    "head_dim": 24,
    "local_attention": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 10, "value_head_dim": 14},
}
MODELS = {"mimo": LIKE_MIMO, "laguna": LIKE_LAGUNA, "wide": WIDE}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # layout, model
    "tp 4, two numbers of copies, zero 3": ({"tp": 4, "dp": 2, "zero": 3}, LIKE_MIMO),
    "tp 2, split sequence, zb-v": ({"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-v"}, LIKE_MIMO),
    "gathered, operations recomputed": (
        {"cp": 2, "context": "gather", "recompute": "qkv+attention+residual"},
        LIKE_LAGUNA,
    ),
    "a ring, recomputed": ({"cp": 2, "context": "ring", "recompute": "full"}, LIKE_MIMO),
    "ulysses, tp 2, operations recomputed": (
        {"cp": 2, "context": "ulysses", "tp": 2, "sequence_parallel": True, "recompute": "qkv+attention"},
        WIDE,
    ),
    "ulysses, pp 2, output recomputed": (
        {"cp": 2, "context": "ulysses", "pp": 2, "recompute": "attn_out+attn_norm"},
        LIKE_LAGUNA | {"attention_gate_width": "channel", "value_head_dim": 6},
    ),
    "Muon, a module ahead, within a budget": (
        {"dp": 2, "optimizer": "muon", "recompute": "budget"},
        WIDE | {"qk_norm": "full", "mtp_layers": 1, "attention_bias": True},
    ),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    layout, model = LAYOUTS[name]
    assert_trains_like_one_process(ranks, references, {**BASE, **layout}, prefix, model, STEPS)


@pytest.mark.parametrize("name", MODELS)
def test_generates_from_what_rows_keep(name, prefix):
    model = MODELS[name]
    config = config_of({**BASE, "microbatches": 1}, prefix, "fp64", model=model, run={"name": name})
    saved = jobs_training.train_and_save(RankContext(0, 1), config, 2, 0)["directory"]
    rows = [[5, 3], [7, 11, 13, 17, 19, 23, 29]]
    built = LanguageModel(saved, precision="fp64")
    cache = built.new_cache(len(rows), SEQUENCE)
    logits = built.read(cache, rows)
    for step in range(3):
        whole = built.logits(rows)
        assert logits is not None and whole is not None
        for row, tokens in enumerate(rows):
            assert logits[row].allclose(whole[len(tokens) - 1, row], rtol=0, atol=1e-12)
            tokens.append((step * 7 + row) % 90)
        logits = built.extend(cache, [tokens[-1] for tokens in rows], [len(tokens) - 1 for tokens in rows])
