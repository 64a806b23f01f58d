"""Configurations as people have them (real_files/README.md): right values, or what is not honoured, judged by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megalite.commands.import_config import main, read
from megalite.importers.convert import Imported, convert, leaves_of, linked_file

FOLDER = Path(__file__).with_name("real_files")


@dataclass
class Real:
    """What must come out of a file.

    Attributes:
        options: among the options.
        lost: all keys that are not honoured, each with a part of the reason.
        said: further keys with a part of what is said about them.
        without: options that must not be set.
        dp: the number of ranks that is given.
        project: the project that is given, where the keys do not tell it.
    """

    options: dict[str, Any]
    lost: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    dp: int | None = None
    project: str | None = None


UNKNOWN, OBJECTIVE = "unknown key", "an objective that is not supported"
REAL = {
    "axolotl/lora-8b.yml": Real(
        {
            **{
                "model.from_hf": "example/llama-3-8b-mirror",
                "model.init_from": "hf:example/llama-3-8b-mirror",
                "lora.rank": 24,
            },
            **{
                "lora.alpha": 48,
                "lora.dropout": 0.1,
                "lora.modules_to_save": ["embedding", "head"],
                "data.packing": True,
            },
            **{
                "data.validation": 0.04,
                "data.sequence_length": 3072,
                "train.epochs": 2,
                "train.global_batch_size": 3 * 2 * 4,
            },
            **{
                "train.micro_batch_size": 3,
                "train.precision": "bf16",
                "train.recompute": "full",
                "optimizer.lr": 1.5e-4,
            },
            **{
                "optimizer.moments": "8bit",
                "optimizer.warmup_steps": "5%",
                "optimizer.decay": "cosine",
                "optimizer.betas": [0.9, 0.999],
                "optimizer.weight_decay": 0,
            },
        },
        said={
            "datasets": "`megalite prepare --chat --input hf:example/recipes-alpaca --tokenizer "
            "example/llama-3-8b-mirror --output PREFIX`"
        },
        without=("lora.targets", "lora.init_from", "run.name"),
        dp=4,
    ),
    "axolotl/streaming-pretrain.yaml": Real(
        {
            **{
                "train.steps": 2000,
                "data.sequence_length": 2048,
                "data.reset_positions": True,
                "train.global_batch_size": 2 * 4 * 2,
            },
            **{
                "optimizer.lr": 3e-4,
                "optimizer.warmup_steps": "2%",
                "optimizer.weight_decay": 0.05,
                "checkpoint.interval": 400,
            },
            **{"checkpoint.keep": 2, "logging.interval": 20},
        },
        said={
            "pretraining_dataset": "`megalite prepare --text_key body --input hf:example/web-crawl:sample-5BT "
            "--tokenizer "
        },
        without=("data.packing", "train.epochs"),
        dp=2,
    ),
    "axolotl/long-completion.yaml": Real(
        {
            **{
                "data.sequence_length": 262_144,
                "parallel.cp": 8,
                "parallel.context": "gather",
                "data.reset_positions": True,
            },
            **{"optimizer.warmup_steps": 50, "train.epochs": 1, "train.micro_batch_size": 1},
        },
        lost={
            "activation_offloading": "offloading activations is not supported",
            "min_sample_len": "keeps short samples",
        },
        said={
            "datasets": "--text_key chapter --input hf:example/textbooks --tokenizer example/llama-3.1-8b --output "
            "PREFIX-2`",
            "deepspeed": "`megalite import-config deepspeed deepspeed_configs/zero3_bf16_cpuoffload_all.json > "
            "deepspeed.yaml`",
        },
        without=("data.packing",),
        dp=1,
    ),
    "axolotl/fsdp-tp-cp.yaml": Real(
        {
            **{"parallel.dp": 2, "parallel.cp": 4, "parallel.tp": 2, "parallel.dp_shard": 2 * 4, "parallel.zero": 3},
            **{"train.global_batch_size": 1 * 3 * 2, "optimizer.decay": "constant", "optimizer.warmup_steps": "10%"},
        },
    ),
    "axolotl/hsdp-tp.yaml": Real(
        {
            **{
                "parallel.dp": 8,
                "parallel.dp_shard": 4,
                "parallel.tp": 2,
                "parallel.zero": 3,
                "train.global_batch_size": 2 * 8,
            },
            **{"optimizer.warmup_steps": "10%", "optimizer.lr": 2e-6},
        },
        said={
            "datasets": "--keys messages=turns,role=speaker,content=text --input hf:example/dialogs "
            "hf:example/more-dialogs "
        },
    ),
    "axolotl/muon-from-scratch.yaml": Real(
        {
            **{
                "model.from_hf": "example/qwen-half-b",
                "model.init_from": "none",
                "optimizer.name": "muon",
                "muon.lr": 0.01,
            },
            **{
                "optimizer.lr": 0.01,
                "muon.weight_decay": 0.02,
                "optimizer.weight_decay": 0.02,
                "muon.adjust_lr": "match_rms_adamw",
            },
            **{
                "train.steps": 500,
                "train.recompute": "none",
                "logging.wandb": "optimizers",
                "run.name": "muon-1",
                "run.seed": 7,
            },
        },
        said={"evals_per_epoch": "disabled", "num_epochs": "overridden by max_steps"},
        without=("train.epochs", "data.packing"),
        dp=1,
    ),
    "axolotl/experts.yaml": Real(
        {
            "parallel.ep": 4,
            "parallel.dp": 8,
            "parallel.dp_shard": 2,
            "train.global_batch_size": 8,
            "data.packing": True,
        },
        lost={"context_parapllel_size": UNKNOWN},
        said={"datasets": "--chat --input ./data/chats.jsonl"},
    ),
    "axolotl/fsdp1-lora.yaml": Real(
        {
            "train.recompute": "full",
            "parallel.zero": 3,
            "parallel.offload": "none",
            "lora.targets": ["q", "k"],
            "data.packing": False,
        },
        said={"lora_target_modules": "adapters are not supported for Wqkv", "gradient_checkpointing": "enabled by"},
        dp=2,
    ),
    "axolotl/preferences.yaml": Real(
        {
            **{"optimizer.lr": 1e-4, "train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1},
            **{"data.sequence_length": 2 * 2048, "data.packing": False, "preference.label_smoothing": 0.0},
        },
        said={
            "datasets": "`megalite prepare --preference --keys messages=conversation --max_length 2048 "
            "--input hf:example/preferences --tokenizer example/qwen-half-b --output PREFIX`"
        },
        dp=2,
    ),
    "llama-factory/lora-pretrain.yaml": Real(
        {
            **{
                "data.sequence_length": 1024,
                "lora.rank": 8,
                "lora.alpha": 16,
                "train.epochs": 2,
                "train.global_batch_size": 2 * 4 * 4,
            },
            **{
                "optimizer.lr": 1e-4,
                "optimizer.warmup_steps": "10%",
                "checkpoint.interval": 200,
                "run.overwrite": True,
            },
        },
        lost={"max_samples": "reduce the input", "ddp_timeout": "above 24 hours"},
        said={"dataset": "`megalite prepare --input FILE --tokenizer example/qwen3-4b --output PREFIX`"},
        without=("data.packing", "data.reset_positions"),
        dp=4,
    ),
    "llama-factory/full-sft-zero3.yaml": Real(
        {
            **{
                "optimizer.lr": 1e-5,
                "train.epochs": 2,
                "train.precision": "bf16",
                "data.packing": True,
                "data.sequence_length": 4095,
            },
            **{"validation.interval": 100, "checkpoint.keep": 3, "lora.rank": 0, "train.global_batch_size": 2 * 8},
        },
        lost={"ddp_timeout": "above 24 hours"},
        said={
            "model_name_or_path": "set model.from_hf",
            "eval_dataset": "set data.validation",
            "dataset": "`megalite prepare --chat --input FILE --tokenizer HF_DIR --output PREFIX`",
            "deepspeed": "`megalite import-config deepspeed examples/deepspeed/ds_z3_config.json > deepspeed.yaml`",
        },
        without=("model.from_hf",),
        dp=8,
    ),
    "llama-factory/muon.yaml": Real(
        {
            **{"optimizer.name": "muon", "muon.lr": 2e-5, "muon.weight_decay": 0, "optimizer.weight_decay": 0},
            **{"optimizer.warmup_steps": 30, "logging.tensorboard": True, "train.global_batch_size": 4 * 2 * 2},
        },
        lost={"max_samples": "reduce the input"},
        dp=2,
    ),
    "llama-factory/megatron-adapter.yaml": Real(
        {
            **{
                "parallel.tp": 4,
                "parallel.pp": 2,
                "parallel.sequence_parallel": True,
                "parallel.zero": 1,
                "lora.rank": 0,
            },
            **{"train.global_batch_size": 8 * 2, "checkpoint.interval": 100},
        },
        lost={"image_max_pixels": "only text data", "video_max_pixels": "only text data"},
        dp=2,
    ),
    "llama-factory/lora-dpo.yaml": Real(
        {
            **{"lora.rank": 16, "lora.alpha": 32, "lora.targets": ["q", "v"], "data.sequence_length": 2 * 2048},
            **{"train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.2, "data.packing": False},
        },
        said={"dataset": "`megalite prepare --preference --max_length 2048 --too_long truncate --input FILE "},
        dp=1,
    ),
    "llama-factory/kto.yaml": Real(
        {
            **{"train.objective": "kto", "preference.beta": 0.2, "preference.desirable_weight": 1.5},
            **{"preference.undesirable_weight": 1.0, "data.sequence_length": 1024, "lora.dropout": 0.0},
            **{"lora.init_from": "saves/sft", "preference.reference": "hf:example/qwen3-4b"},
        },
        said={"pref_ftx": "no likelihood of good completions", "lora_dropout": "turns dropout off"},
        lost={"pref_ftx": "no likelihood"},
        dp=1,
    ),
    "trl/dpo-qlora.yaml": Real(
        {
            **{"train.objective": "dpo", "preference.loss": "apo_zero", "preference.nll_weight": 0.2},
            **{"preference.beta": 0.05, "lora.rank": 64, "lora.targets": ["q", "k", "v", "o"], "lora.dropout": 0.0},
            **{"data.sequence_length": 2 * 2048, "train.global_batch_size": 4 * 4 * 2, "optimizer.lr": 5e-6},
            **{"train.recompute": "full", "train.precision": "bf16", "train.epochs": 1, "model.attention_dropout": 0.0},
        },
        lost={
            **{"max_prompt_length": "limited together", "sync_ref_model": "does not change during a run"},
            "label_smoothing": "TRL 1.16 reads it with robust and exo_pair only; set preference.label_smoothing",
        },
        said={
            "dataset_name": "--preference --split train_prefs --max_length 2048 --too_long keep_end "
            "--input hf:example/feedback",
            "precompute_ref_log_probs": "`megalite score hf:example/zephyr-sft --data PREFIX --output DIR`",
        },
        dp=2,
        project="trl-dpo",
    ),
    "torchtune/full-8b.yaml": Real(
        {
            **{
                "model.from_hf": "/tmp/llama-8b-instruct",
                "train.global_batch_size": 2 * 4 * 4,
                "train.epochs": 2,
                "train.grad_clip": 0,
            },
            **{
                "optimizer.decay": "constant",
                "optimizer.weight_decay": 0.01,
                "data.shuffle": True,
                "validation.interval": 50,
            },
            **{"parallel.zero": 3, "train.precision": "bf16", "train.recompute": "full", "logging.interval": 2},
        },
        said={
            "dataset._component_": "--chat --split 'train[:90%]' --loss_on all --input hf:yahma/alpaca-cleaned "
            "--tokenizer /tmp/",
            "dataset_val._component_": "--output VALIDATION`, then set data.validation to VALIDATION",
        },
        without=("run.seed", "data.sequence_length"),
        dp=4,
    ),
    "torchtune/multinode-70b.yaml": Real(
        {
            **{
                "parallel.tp": 8,
                "parallel.zero": 3,
                "data.reset_positions": True,
                "data.sequence_length": 2048,
                "train.steps": 300,
            },
            **{
                "train.grad_clip": 1,
                "train.compile": True,
                "run.seed": 3,
                "train.global_batch_size": 4 * 2,
                "parallel.offload": "none",
            },
        },
        said={
            "dataset._component_": "`megalite prepare --text_key report --input hf:example/reports --tokenizer "
            "/tmp/llama-70b-instruct/ "
        },
        without=("data.packing", "parallel.dp_shard"),
        dp=2,
    ),
    "torchtune/qlora-2b-single.yaml": Real(
        {
            **{"lora.rank": 32, "lora.targets": ["q", "v", "o", "gate", "up", "down"]},
            **{"optimizer.warmup_steps": 10, "optimizer.moments": "8bit"},
        },
        said={"model._component_": "torchao rounds", "output_dir": "does not set oc.env:SCRATCH"},
        without=("run.dir",),
        dp=1,
    ),
    "torchtune/distillation.yaml": Real(
        {
            **{"lora.rank": 16, "lora.targets": ["q", "v"], "optimizer.warmup_steps": 100, "data.sequence_length": 512},
            **{"train.objective": "distillation", "distillation.divergence": "forward"},
            **{"distillation.teacher": "hf:/tmp/llama-8b-instruct", "distillation.cross_entropy_weight": 1.0},
        },
        said={
            "dataset._component_": "--keys instruction=dialogue,output=summary --input hf:Samsung/samsum",
            "kd_ratio": "1 / 0.5 times as large",
        },
        dp=1,
    ),
    "torchtune/lora-dpo.yaml": Real(
        {
            **{"train.steps": 1000, "optimizer.weight_decay": 0.05, "train.objective": "dpo"},
            **{"preference.loss": "sigmoid", "preference.beta": 0.1, "preference.label_smoothing": 0},
        },
        lost={"dataset._component_": "is not supported"},
        dp=1,
    ),
    "torchtitan/deepseek-16b.toml": Real(
        {
            **{
                "model.preset": "deepseek-v2-lite",
                "parallel.dp": 8,
                "parallel.ep": 4,
                "train.global_batch_size": 4 * 8,
            },
            **{
                "optimizer.decay": "wsd",
                "optimizer.wsd_decay_fraction": 0.6,
                "optimizer.min_lr": 2e-5,
                "optimizer.lr": 2e-4,
            },
            **{"parallel.reduce_dtype": "bf16", "train.compile": True, "train.steps": 1500, "train.precision": "bf16"},
        },
        lost={"training.dtype": "master weights are always fp32", "optimizer.early_step_in_backward": "global norm"},
        said={
            "training.dataset": "`megalite prepare --input hf:allenai/c4:en --tokenizer ./assets/hf/moe-16b --output "
            "PREFIX`"
        },
        without=("checkpoint.interval",),
    ),
    "torchtitan/llama-70b-long.toml": Real(
        {
            **{
                "parallel.tp": 4,
                "parallel.cp": 16,
                "parallel.context": "ring",
                "parallel.dp": 4,
                "parallel.dp_shard": 2 * 16,
            },
            **{
                "parallel.sequence_parallel": True,
                "data.sequence_length": 65536,
                "train.global_batch_size": 4,
                "validation.interval": 200,
            },
            **{
                "validation.batches": 20,
                "checkpoint.interval": 100,
                "checkpoint.async_save": True,
                "optimizer.decay": "linear",
            },
        },
        said={"validation.dataset": "--split validation --input hf:allenai/c4:en"},
    ),
    "torchtitan/integration.toml": Real(
        {
            **{
                "model.intermediate_size": 768,
                "model.vocab_size": 2048,
                "train.recompute": "every-2",
                "parallel.cp": 1,
                "parallel.ep": 1,
            },
            **{
                "optimizer.decay": "wsd",
                "optimizer.wsd_decay_fraction": 0.5,
                "train.global_batch_size": 8 * 2,
                "parallel.pp": 1,
            },
        },
        said={
            "training.dataset": "--format jsonl --input 'tests/assets/c4_test/*.json' --tokenizer "
            "./tests/assets/tokenizer"
        },
        without=("validation.interval", "checkpoint.interval"),
        dp=2,
    ),
    "torchtitan/qwen3-30b-fork.toml": Real(
        {
            **{
                "model.preset": "qwen3-30b-a3b",
                "parallel.ep": 8,
                "parallel.offload": "cpu",
                "parallel.offload_parameters": True,
            },
            **{"train.steps": 4, "train.recompute": "full"},
        },
        lost={"optimizer.state_dtype": UNKNOWN, "training.aggressive_memory_mode": UNKNOWN},
        said={"training.dataset": "--tokenizer HF_DIR"},
        dp=8,
    ),
    "deepspeed/pipeline.json": Real(
        {
            **{
                "train.global_batch_size": 128,
                "train.micro_batch_size": 4,
                "optimizer.lr": 5e-4,
                "optimizer.betas": [0.9, 0.98],
            },
            **{"optimizer.weight_decay": 0, "train.grad_clip": 0, "parallel.zero": 0, "logging.interval": 20},
        },
    ),
    "deepspeed/onebit-adam.json": Real(
        {
            "train.global_batch_size": 2048,
            "train.precision": "fp16",
            "fp16.initial_scale_power": 16,
            "train.grad_clip": 1,
        },
        lost={
            "optimizer.type": "adamw, muon, lion or ademamix",
            **{
                f"optimizer.params.{key}": "only applies to OneBitAdam"
                for key in ("lr", "weight_decay", "bias_correction", "freeze_step", "cuda_aware", "comm_backend_name")
            },
        },
        without=("optimizer.lr",),
    ),
    "deepspeed/zero3-offload-auto.json": Real(
        {
            "parallel.zero": 3,
            "parallel.offload": "cpu",
            "parallel.offload_parameters": True,
            "optimizer.decay": "linear",
        },
        lost={"gradient_accumulation_steps": "train.micro_batch_size * 1 * 8"},
        said={"optimizer.params.lr": "set optimizer.lr", "train_batch_size": "set train.global_batch_size"},
        without=("train.precision", "train.micro_batch_size"),
        dp=8,
    ),
    "deepspeed/commented.json": Real(
        {
            **{
                "train.global_batch_size": 64,
                "train.micro_batch_size": 2,
                "train.precision": "bf16",
                "parallel.zero": 2,
            },
            **{"train.grad_clip": 0.5, "parallel.bucket_mb": 1000},
        },
        lost={"tensor_parallel.autotp_size": "set parallel.tp"},
        said={"fp16.initial_scale_power": "fp16 is disabled"},
        without=("fp16.initial_scale_power",),
    ),
    "deepspeed/layer-drop.json": Real(
        {
            "train.precision": "fp16",
            "optimizer.lr": 8e-4,
            "optimizer.weight_decay": 0.01,
            "train.global_batch_size": 4096,
        },
        lost={
            "prescale_gradients": "only summed",
            "gradient_predivide_factor": "only summed",
            "optimizer.params.bias_correction": "applies bias correction",
            **{
                f"progressive_layer_drop.{key}": "changes the result of a step" for key in ("enabled", "theta", "gamma")
            },
        },
    ),
    "deepspeed/autotuned.json": Real(
        {"train.precision": "fp16", "parallel.zero": 0},
        lost={
            **{
                f"autotuning.{key}": "megalite plan"
                for key in ("enabled", "fast", "arg_mappings.train_micro_batch_size_per_gpu")
            },
            "autotuning.arg_mappings.gradient_accumulation_steps ": "megalite plan",
        },
    ),
    "deepspeed/zero3-all-offloaded.json": Real(
        {"parallel.zero": 3, "parallel.offload": "cpu", "parallel.offload_parameters": True, "train.precision": "bf16"},
        said={"gradient_clipping": "set train.grad_clip"},
        without=("train.grad_clip",),
    ),
    "accelerate/context-parallel.yaml": Real(
        {
            **{
                "parallel.dp": 1,
                "parallel.cp": 8,
                "parallel.context": "gather",
                "parallel.dp_shard": 8,
                "parallel.tp": 1,
            },
            **{"parallel.zero": 3, "parallel.offload": "none", "train.recompute": "full", "train.precision": "bf16"},
        },
    ),
    "accelerate/tp-hsdp.yaml": Real(
        {
            "parallel.dp": 8,
            "parallel.dp_shard": 4,
            "parallel.tp": 2,
            "parallel.cp": 1,
            "parallel.zero": 3,
            "train.recompute": "none",
        },
        without=("parallel.context",),
    ),
    "accelerate/linked-deepspeed.yaml": Real(
        {
            "parallel.dp": 4,
            "parallel.zero": 3,
            "parallel.offload": "cpu",
            "parallel.offload_parameters": True,
            "train.precision": "bf16",
        },
    ),
    "accelerate/megatron-plugin.yaml": Real(
        {
            **{
                "parallel.tp": 2,
                "parallel.pp": 2,
                "parallel.dp": 4,
                "parallel.sequence_parallel": True,
                "parallel.zero": 1,
            },
            **{"train.recompute": "selective", "train.grad_clip": 0.5, "train.precision": "bf16"},
        },
        lost={"megatron_lm_config.megatron_lm_num_micro_batches": "train.micro_batch_size * 4 * 4"},
    ),
    "accelerate/float8.yaml": Real(
        {}, lost={"mixed_precision": "the closest option is train.precision: bf16"}, without=("train.precision",)
    ),
    "accelerate/tpu.yaml": Real(
        {"train.precision": "fp32"},
        lost={
            "distributed_type": "CUDA GPUs and CPUs",
            "num_processes": "set parallel.dp",
            **dict.fromkeys(("tpu_name", "tpu_zone", "command_file"), UNKNOWN),
        },
    ),
}
REJECTED = {
    "llama-factory/new-format.yaml": "Could not recognize the project",
    "deepspeed/template.json": "is not valid JSON: Expecting value: line 2 column 24",
    "accelerate/sagemaker.yaml": "the key debug appears twice",
}


def imported(name: str, dp: int | None, project: str | None = None) -> tuple[Imported, set[str]]:
    """What comes out of a file, and the keys that it has."""
    tree = read(str(FOLDER / name))
    linked = linked_file(tree)
    content = None if linked is None else read(str((FOLDER / name).parent / linked))
    return convert(tree, dp, content, project), {*leaves_of(tree), *(f"{linked}: {key}" for key in leaves_of(content))}


@pytest.mark.parametrize("name", REAL)
def test_a_file_gives_what_it_says(name):
    expected = REAL[name]
    result, keys = imported(name, expected.dp, expected.project)
    assert {option: result.options.get(option) for option in expected.options} == expected.options
    assert not set(expected.without) & result.options.keys()
    lost = [(remark.key, remark.why) for remark in result.remarks if remark.kind == "lost"]
    assert sorted(key for key, _ in lost) == sorted(expected.lost), "each key once"
    said = {remark.key: remark.why for remark in result.remarks}
    for key, part in (expected.lost | expected.said).items():
        assert part in said[key]
    assert keys <= {*result.honoured, *said}, "no key is dropped without a word"


@pytest.mark.parametrize("name", REJECTED)
def test_a_file_without_meaning_ends_with_one_message(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(FOLDER / name)])
    captured = capsys.readouterr()
    assert (
        ended.value.code == 2
        and captured.out == ""
        and captured.err.count("\n") == 1
        and REJECTED[name] in captured.err
    )


def test_every_file_is_judged_and_described():
    files = {
        path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file() and path.name != "README.md"
    }
    files = {name for name in files if not name.startswith("megatron/")}  # test_real_scripts.py has those
    assert files == REAL.keys() | REJECTED.keys()
    described = (FOLDER / "README.md").read_text().partition("## Megatron-LM and its kin")[0]
    rows = re.findall(r"^\| `([\w./-]+)` \|.*\| (all|part|rejected)\b[^|]*\|$", described, re.MULTILINE)
    assert dict(rows) == {
        name: "rejected" if name in REJECTED else "part" if REAL[name].lost else "all" for name in files
    }
