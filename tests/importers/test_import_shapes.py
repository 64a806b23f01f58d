"""Imported configurations and the model: its shape judges only where the file, or a model that it names, gives it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megalite.importers import megatron
from megalite.importers.convert import Imported, convert
from tests.families.hub_cache import hub_cache, store

LLAMA_8B = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
}


def lost(imported: Imported) -> dict[str, str]:
    return {remark.key: remark.why for remark in imported.remarks if remark.kind == "lost"}


def accelerate(**sizes: int) -> dict[str, Any]:
    keys = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": keys}


TITAN = {
    "job": {"dump_folder": "out"},
    "model": {"name": "llama3", "flavor": "17B"},
    "lr_scheduler": {"warmup_steps": 1},
}
DEGREES = {
    "tensor_parallel_degree": 16,
    "pipeline_parallel_degree": 12,
    "context_parallel_degree": 8,
    "expert_parallel_degree": 16,
}
MEGATRON = (
    "pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 12 --context-parallel-size 8 "
    "--expert-model-parallel-size 8 --seq-length 8192"
)
WITHOUT_A_SHAPE: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "axolotl": (
        "axolotl",
        {"base_model": "org/an-8b", "context_parallel_size": 8, "tensor_parallel_size": 8, "sequence_len": 100_000},
        {"parallel.cp": 8, "parallel.tp": 8, "data.sequence_length": 100_000},
    ),
    "LLaMA-Factory": (
        "llama-factory",
        {"model_name_or_path": "org/an-8b", "cutoff_len": 100_000},
        {"data.sequence_length": 100_000},
    ),
    "torchtune": (
        "torchtune",
        {"tensor_parallel_dim": 16, "context_parallel_dim": 8, "tokenizer": {"max_seq_len": 65536}},
        {"parallel.tp": 16, "parallel.cp": 8, "data.sequence_length": 65536},
    ),
    "torchtitan, unknown flavor": (
        "torchtitan",
        TITAN | {"parallelism": DEGREES, "training": {"seq_len": 8192}},
        {"parallel.tp": 16, "parallel.pp": 12, "parallel.cp": 8, "parallel.ep": 16, "data.sequence_length": 8192},
    ),
    "Accelerate": (
        "accelerate",
        accelerate(dp_shard=8, tp=8, cp=8),
        {"parallel.tp": 8, "parallel.cp": 8, "parallel.dp": 8},
    ),
    "Accelerate, trivial": ("accelerate", accelerate(dp_shard=8, tp=8, cp=1), {"parallel.tp": 8, "parallel.cp": 1}),
    "DeepSpeed": ("deepspeed", {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, {"parallel.dp_shard": 8}),
    "Megatron-LM": (
        "megatron",
        megatron.parse(MEGATRON),
        {"parallel.tp": 8, "parallel.pp": 12, "parallel.cp": 8, "data.sequence_length": 8192},
    ),
}


@pytest.mark.parametrize("name", WITHOUT_A_SHAPE)
def test_sizes_are_not_judged_by_a_model_that_the_file_does_not_have(name):
    project, tree, expected = WITHOUT_A_SHAPE[name]
    imported = convert(tree, project=project)
    assert {option: imported.options.get(option) for option in expected} == expected
    assert lost(imported).keys() <= {"model.name", "model.flavor"}
    assert not [remark for remark in imported.remarks if "Legal value" in remark.why], (
        "a legal value would be that of the default model"
    )


@pytest.mark.parametrize(("size", "reason"), [(8, ""), (3, "does not divide model.num_attention_heads = 32"), (16, "")])
def test_sizes_are_judged_by_a_model_that_is_here(tmp_path, size, reason):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    tree = {"base_model": str(tmp_path), "tensor_parallel_size": size, "sequence_len": 4096}
    imported = convert(tree)
    assert ("parallel.tp" in imported.options) == (not reason)
    assert reason in lost(imported).get("tensor_parallel_size", "")


def test_a_model_of_the_hubs_cache_is_here(tmp_path):
    with hub_cache(tmp_path) as cache:
        store(cache, "org/an-8b", {"config.json": json.dumps(LLAMA_8B)})
        imported = convert({"base_model": "org/an-8b", "tensor_parallel_size": 3, "sequence_len": 4096})
    assert "does not divide model.num_attention_heads = 32" in lost(imported)["tensor_parallel_size"]


def test_a_named_shape_judges():
    tree = TITAN | {
        "model": {"name": "llama3", "flavor": "8B"},
        "parallelism": {"tensor_parallel_degree": 3, "pipeline_parallel_degree": 40},
    }
    why = lost(convert(tree))
    assert "model.num_attention_heads = 32" in why["parallelism.tensor_parallel_degree"]
    assert "model.num_hidden_layers = 32" in why["parallelism.pipeline_parallel_degree"]


def test_a_model_that_is_not_trained_here_is_rejected_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 768}))
    imported = convert({"base_model": str(tmp_path), "micro_batch_size": 1})
    assert "mamba" in lost(imported)["base_model"] and "model.from_hf" not in imported.options


def test_a_model_of_the_hub_needs_no_remark():
    """`megalite train` fetches it."""
    assert not [remark for remark in convert({"base_model": "org/an-8b"}).remarks if remark.key == "base_model"]


def test_sizes_that_depend_on_the_ranks_are_judged_where_these_are_known():
    tree = {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}
    (remark,) = (remark for remark in convert(tree).remarks if remark.key.endswith("mics_shard_size"))
    assert remark.kind == "open" and "depends on parallel.dp" in remark.why and "--dp N" in remark.why
    assert "does not divide dp * cp = 4 * 1" in lost(convert(tree, 4))["zero_optimization.mics_shard_size"]
    assert not lost(convert(tree, 16))


@pytest.mark.parametrize("project", ["axolotl", "accelerate"])
def test_one_replica_is_what_a_run_has_anyway(project):
    tree = {"axolotl": {"base_model": "m", "dp_replicate_size": 1}, "accelerate": accelerate(dp_replicate=1, tp=1)}[
        project
    ]
    imported = convert(tree)
    assert not lost(imported) and "parallel.dp" not in imported.options


def test_replicas_of_axolotl_are_sharded_over_the_ranks_that_are_left():
    tree = {"base_model": "m", "fsdp_config": {"fsdp_version": 2}, "dp_replicate_size": 2, "micro_batch_size": 1}
    options = convert(tree, 8).options
    assert (options["parallel.dp"], options["parallel.dp_shard"], options["train.global_batch_size"]) == (8, 4, 8)
    assert any("parallel.dp / 2" in remark.why for remark in convert(tree).remarks)
