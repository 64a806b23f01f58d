"""Configurations of sparse attention with an indexer, and jobs that run them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from megalite.model.blocks.indexed_attention.block import IndexedAttention
from tests.support import jobs
from tests.support.configs import config_of, config_of_one_process, with_fewer_rows
from tests.support.jobs_experts import BASE

INDEXED = {
    **{"num_key_value_heads": None, "kv_lora_rank": 12, "q_lora_rank": 16, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 4, "v_head_dim": 6, "index_topk": 5, "index_n_heads": 16, "index_head_dim": 8},
    **{"index_loss_coef": 0.7, "initializer_range": 0.2},
}
SHARED = {"indexer_types": ["full", "shared", "full", "full"]}
Selections = dict[tuple[int, int, int, int], tuple[int, ...]]
"""Step, layer, sample and position of a token -> the rows that it selects."""


def configs(prefix: str, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    case = {**BASE, "kv_heads": None, **layout}
    one, several = config_of_one_process(case, prefix), config_of(case, prefix, "fp64")
    if "ep" in layout:
        several["parallel"] |= {"ep": layout["ep"]}
    with_fewer_rows(one, several)
    for config in (one, several):
        config["model"] |= INDEXED | layout.get("model", {})
        config["train"] |= layout.get("train", {})
        config["lora"] = layout.get("lora", {})
    return several, one


def train(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """`jobs.train`, with the selections of this rank's own tokens."""
    recorded: Selections = {}
    make = IndexedAttention.selection

    def selection(block: IndexedAttention, inputs: Any, state: Any) -> torch.Tensor:
        first = block.selecting not in state.selections
        rows = make(block, inputs, state)
        if first and state.training:
            own = block.selections.own(rows, state.part).tolist()
            positions = block._own(state.positions).expand(-1, len(state.samples)).tolist()
            for position, per_sample in zip(positions, own, strict=True):
                for at, sample, chosen in zip(position, state.samples.tolist(), per_sample, strict=True):
                    recorded[state.step, block.layer, sample, at] = tuple(chosen)
        return rows

    with patch.object(IndexedAttention, "selection", selection):
        return {**jobs.train(context, config, steps), "selections": recorded}
