"""Operations that backward computes again give the bits of keeping everything, in every family, and the graph lets go
of what it drops."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from megalite.config.recompute import OPERATIONS
from megalite.model.recomputation import Value
from tests.planner.test_memory import ALONE, GPT2, tree
from tests.support import jobs_memory
from tests.support.pool import RankContext

EVERYTHING = "+".join(OPERATIONS)
DROPOUT = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.1)
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
FAMILIES = {
    **{name: case for name, case in ALONE.items() if "recompute" not in case.get("train", {})},
    "dropout": {"model": DROPOUT},
    "dropout, layer norms": {"model": {**DROPOUT, **GPT2}},
    "experts": {"model": EXPERTS},
}


def stepped(case: dict[str, Any], recompute: str) -> list[torch.Tensor]:
    """The weights after two steps, of the buckets that keep any: matrices of a quantized base have codes alone."""
    torch.manual_seed(0)
    config = tree(**{**case, "train": {**case.get("train", {}), "recompute": recompute}})
    rank = jobs_memory.Stepping(RankContext(0, 1), config)
    for number in (1, 2):
        rank.step(number)
    return [bucket.weights for bucket in rank.parts.store.buckets if bucket.weights.untyped_storage().size()]


@pytest.fixture(scope="module")
def kept():
    known: dict[str, list[torch.Tensor]] = {}

    def once(name: str) -> list[torch.Tensor]:
        if name not in known:
            known[name] = stepped(FAMILIES[name], "none")
        return known[name]

    return once


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_everything_changes_no_bit(family, kept):
    for actual, expected in zip(stepped(FAMILIES[family], EVERYTHING), kept(family), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_changes_no_bit(operation, kept):
    family = {"experts": "experts", "attn_out": "parallel, two norms, plain"}.get(
        operation, "norms everywhere, soft caps"
    )
    for actual, expected in zip(stepped(FAMILIES[family], operation), kept(family), strict=True):
        assert torch.equal(actual, expected)


def test_layers_may_differ(kept):
    modes = "attn_norm+mlp_norm,full,residual+mlp_in,none"
    for actual, expected in zip(stepped(FAMILIES["dropout"], modes), kept("dropout"), strict=True):
        assert torch.equal(actual, expected)


def test_nothing_is_left_after_a_step():
    stepped(FAMILIES["dropout"], EVERYTHING)
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Value)]


def test_blocks_beside_each_other_drop_output_and_norm_together():
    case = FAMILIES["parallel, two norms, plain"]
    model = {**case["model"], "num_hidden_layers": 8, "vocab_size": 32}  # the peak is what layers keep
    output, norm, both = (
        jobs_memory.most_allocated(RankContext(0, 1), tree(**{**case, "model": model, "train": {"recompute": mode}}))
        for mode in ("attn_out", "mlp_norm", "attn_out+mlp_norm")
    )
    assert both <= norm < output


def test_recomputed_experts_keep_neither_logits_nor_probabilities():
    case, layers, tokens, few, many = FAMILIES["experts"], 8, 160, 4, 64

    def dropped(experts: int) -> int:
        sizes = {"num_hidden_layers": layers, "vocab_size": 32, "num_experts": experts, "moe_intermediate_size": 8}
        config = {**case, "model": {**case["model"], **sizes}}
        kept, recomputed = (
            jobs_memory.most_allocated(RankContext(0, 1), tree(**{**config, "train": {"recompute": mode}}))
            for mode in ("none", "experts")
        )
        return kept - recomputed

    # of all layers but the one whose backward is running
    assert dropped(many) - dropped(few) >= 2 * 4 * (layers - 1) * tokens * (many - few)
