"""A block as one node of the graph trains to the same bits as a node for each of its operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.model.layer import Layer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import make_trainer

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 2, "masked": False, "dropout": 0.0}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, case, sections
    "plain": (1, {}, {}),
    "several rows, as many key-value heads": (1, {"kv_heads": 4}, {"train": {"micro_batch_size": 2}}),
    "bf16": (1, {}, {"train": {"precision": "bf16"}}),
    "layer norm, biases, a plain activation": (
        1,
        {},
        {
            "model": {
                "norm": "layer",
                "attention_bias": True,
                "mlp_bias": True,
                "gated_mlp": False,
                "hidden_act": "gelu",
            }
        },
    ),
    "window, soft-cap, dropout of scores": (
        1,
        {},
        {"model": {"sliding_window": 5, "attention_softcap": 20.0, "attention_dropout": 0.2}},
    ),
    "norms of heads, output norms, dropout, a multiplier": (
        1,
        {"dropout": 0.2},
        {"model": {"qk_norm": "head", "norm_placement": "both", "residual_multiplier": 0.5}},
    ),
    "only output norms": (1, {}, {"model": {"norm_placement": "post"}}),
    "documents": (1, {}, {"data": {"reset_positions": True}}),
    "scores recomputed": (1, {}, {"train": {"recompute": "selective"}}),
    "layers recomputed": (1, {}, {"train": {"recompute": "full"}}),
    "adapters": (1, {}, {"lora": {"rank": 4, "targets": "all"}}),
    "experts": (1, {}, {"model": {"num_experts": 4, "num_experts_per_tok": 2}}),
    "tp, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}, {}),
    "tp": (2, {"tp": 2}, {}),
    "pp, split backward": (2, {"pp": 2, "microbatches": 4}, {"parallel": {"schedule": "zb-h1"}}),
    "ZeRO-3": (2, {"dp": 2, "zero": 3}, {}),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), CASE["vocab_size"])


def trained(context: Any, config: dict[str, Any], by_block: bool) -> tuple[Any, ...]:
    """Losses, norms and weights of three steps, and whether any layer had a block that is a node."""
    trainer = make_trainer(context, config)
    layers = [layer for stage in trainer.parts.runtime.stages.values() for layer in stage.layers.values()]
    assert all(isinstance(layer, Layer) for layer in layers)
    has_nodes = all(layer.nodes for layer in layers)
    if not by_block:
        for stage in trainer.parts.runtime.stages.values():
            stage.joined = stage.single
        for layer in layers:
            layer.nodes = []
    results = [trainer.step() for _ in range(3)]
    tensors = {name: value.clone() for name, value in global_tensors(trainer).items()}
    trainer.close()
    return has_nodes, [(result.loss, result.grad_norm) for result in results], tensors


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_operation_by_operation(name, ranks, prefix):
    world, case, sections = CASES[name]
    config = config_of({**CASE, **case}, prefix, **sections)
    for nodes, operations in zip(
        ranks.run(world, trained, config, True), ranks.run(world, trained, config, False), strict=True
    ):
        has_nodes, results, tensors = nodes
        _, expected_results, expected = operations
        assert has_nodes
        assert results == expected_results
        assert tensors.keys() == expected.keys()
        assert [key for key in tensors if not torch.equal(tensors[key], expected[key])] == []
