"""A block as one node of the graph trains to the same bits as a node for each of its operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.model.layer import Layer
from megalite.parallel.tensor.linear import RowParallelLinear
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import make_trainer

CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 96, "layers": 2, "masked": False, "dropout": 0.0}
LATENTS = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.02}
EXPERTS |= {"shared_expert_intermediate_size": 16, "shared_expert_gate": True, "initializer_range": 0.2}
FACTORS = {"query_scale_beta": 0.7, "query_scale_positions": 3}
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
    "gates": (1, {}, {"model": {"attention_gate": True}, "train": {"precision": "bf16"}}),
    "gates, norms of heads": (2, {"tp": 2}, {"model": {"attention_gate": True, "qk_norm": "head"} | FACTORS}),
    "norms without weights, after the rotation": (
        1,
        {},
        {"model": {"qk_norm": "head", "qk_norm_after_rope": True, "qk_norm_weight": False, "norm_weight": False}},
    ),
    "gates, norms after the rotation": (
        2,
        {"tp": 2},
        {"model": {"attention_gate": True, "qk_norm": "each_head", "qk_norm_after_rope": True} | FACTORS}
        | {"train": {"precision": "bf16"}},
    ),
    "heads by layer, narrow values, gates of heads": (
        1,
        {},
        {"model": {"layer_heads": [4, 8], "value_head_dim": 6, "attention_gate": True, "attention_gate_width": "head"}},
    ),
    "norms over all heads, output norms": (
        2,
        {"tp": 2, "kv_heads": 1},
        {"model": {"qk_norm": "full", "norm_placement": "post"}},
    ),
    "gates, norms over all heads after the rotation": (
        1,
        {},
        {"model": {"attention_gate": True, "qk_norm": "full", "qk_norm_after_rope": True} | FACTORS}
        | {"train": {"precision": "bf16"}},
    ),
    "only output norms": (1, {}, {"model": {"norm_placement": "post"}}),
    "documents, factors on queries": (1, {}, {"data": {"reset_positions": True}, "model": FACTORS}),
    "scores recomputed": (1, {}, {"train": {"recompute": "selective"}}),
    "layers recomputed": (1, {}, {"train": {"recompute": "full"}}),
    "adapters": (1, {}, {"lora": {"rank": 4, "targets": ["q", "k", "v", "o", "gate", "up", "down"]}}),
    "latents": (1, {"kv_heads": 4}, {"model": LATENTS | FACTORS, "train": {"recompute": "selective"}}),
    "latents, of queries too": (
        2,
        {"tp": 2, "sequence_parallel": True, "kv_heads": 4},
        {"model": LATENTS | {"q_lora_rank": 12, "attention_bias": False}, "train": {"precision": "bf16"}},
    ),
    "latents, tp, without a rotation": (2, {"tp": 2, "kv_heads": 4}, {"model": LATENTS | {"position": "none"}}),
    "experts": (1, {}, {"model": {"num_experts": 4, "num_experts_per_tok": 2}}),
    "experts beside a dense layer, shared, of latents": (
        2,
        {"tp": 2, "sequence_parallel": True},
        {"model": EXPERTS | {"mlp_only_layers": [0], "moe_latent_size": 12, "norm_placement": "both"}},
    ),
    "experts recomputed": (1, {}, {"model": EXPERTS, "train": {"recompute": "full", "precision": "bf16"}}),
    "tp, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}, {}),
    "tp": (2, {"tp": 2}, {}),
    "pp, split backward": (2, {"pp": 2, "microbatches": 4}, {"parallel": {"schedule": "zb-h1"}}),
    "ZeRO-3": (2, {"dp": 2, "zero": 3}, {}),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), CASE["vocab_size"])


def trained(context: Any, config: dict[str, Any], by_block: bool, in_matmul: bool = False) -> tuple[Any, ...]:
    """Whether each layer is one node, and losses, norms and weights of two steps.

    `in_matmul`: residual sums are a part of matmuls, as on a GPU.
    """
    trainer = make_trainer(context, config)
    layers = [layer for stage in trainer.parts.runtime.stages.values() for layer in stage.layers.values()]
    assert all(isinstance(layer, Layer) for layer in layers)
    are_nodes = all(len(layer.nodes) == 1 for layer in layers)
    if not by_block:
        for stage in trainer.parts.runtime.stages.values():
            stage.joined = stage.single
        for layer in layers:
            layer.nodes = []
    for module in trainer.parts.runtime.stages[0].modules() if in_matmul else ():
        for linear in vars(module).values():
            if isinstance(linear, RowParallelLinear):
                linear.adds_residual = True
    results = [trainer.step() for _ in range(2)]
    tensors = {name: value.clone() for name, value in global_tensors(trainer).items()}
    trainer.close()
    return are_nodes, [(result.loss, result.grad_norm) for result in results], tensors


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_operation_by_operation(name, ranks, prefix):
    world, case, sections = CASES[name]
    config = config_of({**CASE, **case}, prefix, **sections)
    for nodes, operations in zip(
        ranks.run(world, trained, config, True), ranks.run(world, trained, config, False), strict=True
    ):
        are_nodes, results, tensors = nodes
        _, expected_results, expected = operations
        assert are_nodes and all(norm > 0 for _, norm in results)
        assert results == expected_results
        assert tensors.keys() == expected.keys()
        assert [key for key in tensors if not torch.equal(tensors[key], expected[key])] == []


def test_a_residual_sum_may_be_a_part_of_the_matmul(ranks, prefix):
    config = config_of(CASE, prefix, precision="fp64")
    ((_, results, tensors),) = ranks.run(1, trained, config, True, True)
    ((_, expected_results, expected),) = ranks.run(1, trained, config, True)
    torch.testing.assert_close(results, expected_results, rtol=1e-13, atol=0)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=1e-13)


def test_no_second_backward(prefix):
    """What the first one has freed cannot be used again."""
    config = from_dict(config_of(CASE, prefix))
    trainer = Trainer(config, make_mesh(config))
    (stage,), (batch,) = trainer.parts.runtime.stages.values(), trainer.loader.step(0)
    trainer.store.reducer.begin_step(1)
    out = stage.trunk(batch.tokens, stage.forward_state(batch, 1, training=True)).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward()
    trainer.close()


def test_a_norm_of_the_output_follows_the_block_s_own_factor(ranks, prefix):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1], "initializer_range": 0.2}
    model = {"norm_placement": "post", "rms_norm_eps": 1e-30, "position": "none"} | experts
    factors = {"attention_in_multiplier": 0.7, "attention_out_multiplier": 0.6, "mixture_out_multiplier": 0.5}
    plain, scaled = (
        config_of(CASE, prefix, "fp64", model=model | each)
        for each in ({}, factors | {"attention_scale": 1 / 0.49 / 8**0.5})
    )
    ((_, results, tensors),) = ranks.run(1, trained, scaled, True)
    ((_, expected_results, expected),) = ranks.run(1, trained, plain, True)
    torch.testing.assert_close(results, expected_results, rtol=1e-9, atol=0)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=1e-9)
