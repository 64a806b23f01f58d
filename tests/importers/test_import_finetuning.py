"""Imported configurations of axolotl, LLaMA-Factory and torchtune: what a run makes of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from megalite.config.errors import ConfigError
from megalite.importers.convert import convert
from tests.importers.imported import TOKENS, imported, leaves

SHAPE = {
    **{
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
}
AXOLOTL = {
    **{
        "base_model": "MODEL",
        "model_type": "LlamaForCausalLM",
        "load_in_8bit": True,
        "datasets": [{"path": "org/alpaca", "type": "alpaca"}],
    },
    **{
        "val_set_size": 0.05,
        "output_dir": "./outputs/lora",
        "sequence_len": 4096,
        "sample_packing": False,
        "adapter": "lora",
    },
    **{
        "lora_model_dir": None,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_modules": ["q_proj", "v_proj", "lm_head"],
    },
    **{
        "gradient_accumulation_steps": 4,
        "micro_batch_size": 2,
        "num_epochs": 4,
        "optimizer": "adamw_bnb_8bit",
        "lr_scheduler": "cosine",
    },
    **{
        "learning_rate": 2e-4,
        "bf16": "auto",
        "tf32": False,
        "gradient_checkpointing": True,
        "logging_steps": 1,
        "flash_attention": True,
    },
    **{
        "warmup_ratio": 0.1,
        "evals_per_epoch": 4,
        "weight_decay": 0.0,
        "wandb_project": None,
        "fsdp": ["full_shard", "auto_wrap"],
    },
    "fsdp_config": {"fsdp_offload_params": True, "fsdp_sharding_strategy": "FULL_SHARD", "limit_all_gathers": True},
    **{"special_tokens": {"pad_token": "<|end_of_text|>"}, "cosine_min_lr_ratio": 0.1, "made_up": 1},
}
FACTORY = {
    **{
        "model_name_or_path": "MODEL",
        "trust_remote_code": True,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
    },
    **{
        "lora_rank": 4,
        "lora_target": "all",
        "dataset": "identity,alpaca",
        "template": "llama3",
        "cutoff_len": 2048,
        "max_samples": 1000,
    },
    **{
        "output_dir": "saves/sft",
        "logging_steps": 10,
        "save_steps": 500,
        "plot_loss": True,
        "overwrite_output_dir": True,
    },
    **{
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4,
        "num_train_epochs": 3.0,
    },
    **{
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "bf16": True,
        "ddp_timeout": 1800,
        "deepspeed": "ds_z3.json",
        "made_up": 1,
    },
}
TUNE = {
    "output_dir": "out",
    "tokenizer": {
        "_component_": "torchtune.models.llama3.llama3_tokenizer",
        "path": "MODEL/tokenizer.model",
        "max_seq_len": 1024,
    },
    "model": {
        **{"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_attn_modules": ["q_proj", "output_proj"]},
        **{
            "apply_lora_to_mlp": True,
            "apply_lora_to_output": False,
            "lora_rank": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.0,
        },
    },
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "MODEL",
        "output_dir": "${output_dir}",
    },
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "source": "org/alpaca", "packed": False},
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 3e-4},
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 100,
    },
    **{
        "seed": None,
        "shuffle": True,
        "batch_size": 2,
        "epochs": 200,
        "gradient_accumulation_steps": 8,
        "compile": False,
        "device": "cuda",
    },
    **{"dtype": "bf16", "enable_activation_checkpointing": True, "log_every_n_steps": 5, "made_up": 1},
}
FILES = {"axolotl": AXOLOTL, "llama-factory": FACTORY, "torchtune": TUNE}


@pytest.fixture
def written(tmp_path):
    """written(content) → the path of a YAML file in which MODEL is the directory of a model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))

    def write(content: dict) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content).replace("MODEL", str(model)))
        return path

    return write


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_accounted_for_and_the_project_is_recognized(written, tmp_path, capsys, name):
    path = written(FILES[name])
    options, lost, notes, config = imported(capsys, tmp_path, path, "--dp", 4)
    assert options == imported(capsys, tmp_path, name, path, "--dp", 4)[0]
    result = convert(yaml.safe_load(path.read_text()), 4)
    assert set(leaves(FILES[name])) <= {*result.honoured, *(remark.key for remark in result.remarks)}
    assert "unknown key of" in lost["made_up"]
    model = str(tmp_path / "model")
    assert (config.model.from_hf, config.model.init_from, config.model.hidden_size) == (model, f"hf:{model}", 64)
    assert (
        config.train.precision == "bf16" and config.optimizer.betas == [0.9, 0.999] and config.train.recompute == "full"
    )
    assert any("megalite prepare --chat" in why for why in notes["open"].values())


def test_axolotl(written, tmp_path, capsys):
    _, lost, notes, config = imported(capsys, tmp_path, written(AXOLOTL), "--dp", 4)
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (2 * 4 * 4, 2)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 16, ["q", "v"])
    assert (config.parallel.zero, config.parallel.offload, config.parallel.offload_parameters) == (3, "cpu", True)
    assert (
        config.optimizer.min_lr == pytest.approx(2e-5)
        and config.data.validation == 0.05
        and config.data.sequence_length == 4096
    )
    assert lost.keys() == {"made_up"} and config.optimizer.moments == "8bit" and config.lora.base == "int8"
    samples = (int(TOKENS * 0.95) - 1) // 4096
    assert config.train.steps == math.ceil(4 * samples / 32) and config.optimizer.warmup_steps == math.ceil(
        0.1 * config.train.steps
    )
    assert "lm_head" in notes["approximate"]["lora_target_modules"] and "hf:org/alpaca" in notes["open"]["datasets"]


def test_variants_of_adapters(written, tmp_path, capsys):
    """DoRA, rank-stabilised scaling and modules trained in full have the names of PEFT in every project."""
    variants = {"peft_use_dora": True, "peft_use_rslora": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]}
    lora = imported(capsys, tmp_path, written(AXOLOTL | variants))[3].lora
    assert (lora.dora, lora.scaling, lora.modules_to_save) == (True, "rslora", ["embedding", "head"])
    variants = {"use_dora": True, "use_rslora": True, "additional_target": "embed_tokens,other"}
    _, _, notes, config = imported(capsys, tmp_path, written(FACTORY | variants))
    assert (config.lora.dora, config.lora.scaling, config.lora.modules_to_save) == (True, "rslora", ["embedding"])
    assert "other" in notes["approximate"]["additional_target"]


def test_axolotls_mesh(written, tmp_path, capsys):
    config = imported(
        capsys, tmp_path, written(AXOLOTL | {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2})
    )[3]
    assert (config.parallel.dp, config.parallel.dp_shard, config.parallel.tp, config.train.global_batch_size) == (
        8,
        4,
        2,
        2 * 4 * 8,
    )


def test_llama_factory(written, tmp_path, capsys):
    _, lost, notes, config = imported(capsys, tmp_path, written(FACTORY), "--dp", 4)
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (1 * 8 * 4, 1)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (4, 8, None), (
        "alpha is twice the rank by default"
    )
    assert config.run.timeout == "1800s" and config.checkpoint.interval == 500 and config.optimizer.decay == "cosine"
    assert lost.keys() == {"max_samples", "made_up"} and "import-config deepspeed" in notes["open"]["deepspeed"]
    packed = imported(
        capsys, tmp_path, written(FACTORY | {"neat_packing": True, "finetuning_type": "full", "max_steps": 30})
    )
    assert packed[0]["data.sequence_length"] == 2047 and packed[0]["lora.rank"] == 0 and packed[0]["data.packing"]
    assert (packed[3].train.steps, packed[3].optimizer.warmup_steps) == (30, 3), "max_steps counts, and no epochs"


def test_torchtune(written, tmp_path, capsys):
    _, lost, notes, config = imported(capsys, tmp_path, written(TUNE), "--dp", 4)
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.parallel.zero) == (2 * 8 * 4, 2, 3)
    assert (config.lora.rank, config.lora.targets) == (8, ["q", "o", "gate", "up", "down"])
    assert (config.optimizer.warmup_steps, config.optimizer.decay, config.optimizer.weight_decay) == (
        100,
        "cosine",
        0.01,
    )
    assert (config.train.grad_clip, config.data.sequence_length) == (0, 1024)
    assert config.train.steps == math.ceil(200 * ((TOKENS - 1) // 1024) / 64)
    assert lost.keys() == {"made_up"} and "hf:org/alpaca" in notes["open"]["dataset._component_"]


def test_the_ranks_decide_the_batch_and_are_asked_for(written, tmp_path, capsys):
    """Without them the formula is given; it is the same wherever the accumulation stands."""
    for content, key, micro in (
        (AXOLOTL, "gradient_accumulation_steps", 2),
        (FACTORY, "gradient_accumulation_steps", 1),
    ):
        options, lost, _, _ = imported(capsys, tmp_path, written(content))
        assert "train.global_batch_size" not in options
        assert f"set train.global_batch_size to {micro} * {content[key]} * parallel.dp" in lost[key]


def judged(project: str, content: dict, dp: int | None = None) -> tuple[dict[str, object], dict[str, tuple[str, str]]]:
    """The options of a file's content, and key → the kind and the reason of its remark."""
    imported = convert(content, dp, project=project)
    return imported.options, {remark.key: (remark.kind, remark.why) for remark in imported.remarks}


def test_axolotls_batch_size_is_that_of_a_rank():
    content = {"base_model": "m", "batch_size": 8, "micro_batch_size": 2}
    assert judged("axolotl", content, 4)[0]["train.global_batch_size"] == 8 * 4
    options, said = judged("axolotl", content)
    assert "train.global_batch_size" not in options and "2 * 4 * parallel.dp" in said["gradient_accumulation_steps"][1]
    assert judged("axolotl", content | {"gradient_accumulation_steps": 1}, 4)[0]["train.global_batch_size"] == 2 * 4


@pytest.mark.parametrize(("plain", "neat"), [(True, False), (False, True), (False, False)])
def test_packing_is_on_if_either_key_is(plain, neat):
    options, _ = judged("llama-factory", {"model_name_or_path": "m", "packing": plain, "neat_packing": neat})
    assert options["data.packing"] is (plain or neat)


@pytest.mark.parametrize(
    ("project", "choice"), [("axolotl", {"optimizer": "muon"}), ("llama-factory", {"use_muon": True})]
)
def test_muon_of_one_rate_updates_as_much_as_adamw(project, choice):
    start = {"axolotl": {"base_model": "m"}, "llama-factory": {"model_name_or_path": "m", "finetuning_type": "full"}}[
        project
    ]
    options, _ = judged(project, start | {"learning_rate": 3e-4} | choice)
    assert options["optimizer.name"] == "muon" and options["muon.adjust_lr"] == "match_rms_adamw"
    assert options["muon.lr"] == options["optimizer.lr"] == 3e-4


def test_references_of_torchtune_are_followed():
    component = {"_component_": "torch.optim.AdamW", "lr": "${lr}"}
    content = {
        "lr": "${base_lr}",
        "base_lr": 3e-4,
        "optimizer": component,
        "output_dir": "${root}/out",
        "root": "/r",
        "dtype": "${gone}",
    }
    options, said = judged("torchtune", content)
    assert (options["optimizer.lr"], options["run.dir"]) == (3e-4, "/r/out")
    assert said["lr"][0] == said["base_lr"][0] == "harmless" and "does not set gone" in said["dtype"][1]
    assert judged("torchtune", {"a": "${b}", "b": "${a}"})[1]["a"][0] == "open"


@pytest.mark.parametrize(
    ("project", "content"),
    [
        ("llama-factory", {"model_name_or_path": "m", "per_device_train_batch_size": 4}),
        ("axolotl", {"base_model": "m", "micro_batch_size": 4}),
        ("torchtune", {"batch_size": 4}),
        ("deepspeed", {"train_micro_batch_size_per_gpu": 4}),
        ("megatron", {"micro-batch-size": 4}),
    ],
)
def test_a_batch_that_depends_on_the_ranks_is_left_open(project, content):
    options, said = judged(project, content)
    assert "train.global_batch_size" not in options
    assert ("open", "set train.global_batch_size to 4 * parallel.dp") in said.values()
    assert judged(project, content, 8)[0]["train.global_batch_size"] == 32


def test_the_length_of_a_run_is_that_of_the_other_project():
    """axolotl trains for one epoch and LLaMA-Factory for three; axolotl warms up over 3% of the steps, at most 100."""
    options, said = judged("llama-factory", {"model_name_or_path": "m"})
    assert options["train.epochs"] == 3 and said["num_train_epochs"][0] == "assumed"
    options, said = judged("axolotl", {"base_model": "m"})
    assert (options["train.epochs"], options["optimizer.warmup_steps"]) == (1, "3%") and "limited to 100 steps" in said[
        "warmup_ratio"
    ][1]
    for steps, warmup in ((1000, 30), (10_000, 100)):
        options, _ = judged("axolotl", {"base_model": "m", "max_steps": steps})
        assert options["optimizer.warmup_steps"] == warmup and "train.epochs" not in options
    assert judged("axolotl", {"base_model": "m", "warmup_ratio": 0.5})[0]["optimizer.warmup_steps"] == "50%"


@pytest.mark.parametrize(
    ("kind", "parameters", "options"),
    [
        ("cosine_with_min_lr", {"min_lr": 1e-6}, {"optimizer.decay": "cosine", "optimizer.min_lr": 1e-6}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"optimizer.decay": "cosine", "optimizer.min_lr": 2e-5}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 50, "min_lr_ratio": 0.05},
            {"optimizer.decay": "wsd", "optimizer.wsd_decay_fraction": 0.25, "optimizer.min_lr": 1e-5},
        ),
    ],
)
def test_the_schedules_parameters_are_kept(kind, parameters, options):
    content = {
        "model_name_or_path": "m",
        "stage": "sft",
        "learning_rate": 2e-4,
        "max_steps": 200,
        "lr_scheduler_type": kind,
    }
    result, said = judged("llama-factory", content | {"lr_scheduler_kwargs": parameters | {"num_cycles": 2}})
    assert {option: result.get(option) for option in options} == options
    assert said["lr_scheduler_kwargs.num_cycles"][0] == "lost"


def test_arguments_of_transformers_trainer_are_named_as_such():
    for content in (
        {"per_device_train_batch_size": 4, "learning_rate": 1e-4},
        {"per-device-train-batch-size": 4, "output-dir": "x"},
    ):
        with pytest.raises(ConfigError, match="Arguments of transformers' Trainer"):
            convert(content)


def test_the_targets_of_any_family_are_kept():
    """Fused projections keep the names of their family; lora_target_linear adds all others to the list."""
    content = {
        "base_model": "m",
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_modules": ["qkv_proj", "gate_up_proj", "q_proj", "lm_head"],
    }
    options, said = judged("axolotl", content)
    assert (
        options["lora.targets"] == ["qkv_proj", "gate_up_proj", "q"]
        and "adapters are not supported for lm_head" in said["lora_target_modules"][1]
    )
    assert "lora.targets" not in judged("axolotl", content | {"lora_target_linear": True})[0]
    options, _ = judged("llama-factory", {"model_name_or_path": "m", "lora_target": "query_key_value,c_attn"})
    assert options["lora.targets"] == ["query_key_value", "c_attn"]


@pytest.mark.parametrize(("project", "held_out"), [("axolotl", "val_set_size"), ("llama-factory", "val_size")])
def test_steps_of_validation_count_where_data_is_held_out(project, held_out):
    content = {"eval_steps": 50, "eval_strategy": "steps"}
    assert judged(project, content | {held_out: 0.1})[0]["validation.interval"] == 50
    assert "validation.interval" not in judged(project, content | {held_out: 0.1, "eval_strategy": "no"})[0]
    assert "requires validation data" in judged(project, content)[1]["eval_steps"][1]


def test_names_and_sharding_of_axolotl_and_torchtune():
    options, _ = judged(
        "axolotl", {"base_model": "m", "wandb_name": "a", "wandb_run_id": "b", "fsdp": ["full_shard", "offload"]}
    )
    assert (options["run.name"], options["parallel.zero"]) == ("a", 3)
    assert options["parallel.offload"] == "cpu" and options["parallel.offload_parameters"]
    options, _ = judged("torchtune", {"data_parallel_replicate_dim": 2}, 8)
    assert (options["parallel.dp"], options["parallel.dp_shard"]) == (8, 4)
    assert (
        "parallel.dp / 2"
        in judged("torchtune", {"data_parallel_replicate_dim": 2})[1]["data_parallel_replicate_dim"][1]
    )


def test_added_tokens_resize_the_model_and_are_asked_for():
    words = {
        "model_name_or_path": "models/llama",
        "stage": "sft",
        "finetuning_type": "lora",
        "template": "llama3",
        "cutoff_len": 64,
    }
    imported = convert({**words, "resize_vocab": True, "add_tokens": "<a>,<b>"}, project="llama-factory")
    assert imported.options["model.resize_embeddings"] == "mean"
    assert "set model.resize_embeddings" in {remark.key: remark.why for remark in imported.remarks}["add_tokens"]
    assert "model.resize_embeddings" not in convert({**words, "resize_vocab": False}, project="llama-factory").options


@pytest.mark.parametrize(
    ("rl", "kind", "says"),
    [
        ("dpo", "chatml.intel", "--preference --keys instruction=question --max_length 512 --input hf:org/pairs"),
        ("orpo", "llama3.argilla", "--keys chosen=chosen_response,rejected=rejected_response"),
        ("ipo", "chatml.argilla_chat", "megalite prepare --preference --max_length 512 --input"),
        ("kto", "llama3.prompt_pairs", "--preference --keys instruction=prompt"),
        ("dpo", "user_defined.default", "type user_defined.default is not supported: convert it to TRL"),
        ("kto", "chatml.argilla_chat", "type chatml.argilla_chat is not supported"),
        ("grpo", "chat_template.default", "train with TRL, verl, OpenRLHF or NeMo-RL"),
    ],
)
def test_axolotls_preferences(rl, kind, says):
    _, said = judged("axolotl", {"base_model": "m", "rl": rl, "datasets": [{"path": "org/pairs", "type": kind}]})
    assert says in said["datasets"][1]


PAIRS = {"data.sequence_length": 2048, "data.packing": False}
DPO = {"train.objective": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1}
FIELDS: dict[str, tuple[str, dict, dict]] = {
    # the project, fields beside a model and a length of 1024, what comes out
    "axolotl, lengths": ("axolotl", {"rl": "dpo", "dpo_norm_loss": True}, DPO | {"preference.loss": "sigmoid_norm"}),
    "axolotl, several losses": (
        "axolotl",
        {"rl": "dpo", "dpo_loss_type": ["robust", "sft"], "dpo_loss_weights": [1, 0.5], "dpo_label_smoothing": 0.1},
        PAIRS | {"preference.loss": "robust", "preference.nll_weight": 0.5, "preference.label_smoothing": 0.1},
    ),
    "axolotl, ipo": (
        "axolotl",
        {"rl": "ipo", "rl_beta": 0.5},
        PAIRS | {"train.objective": "ipo", "preference.beta": 0.5},
    ),
    "axolotl, orpo": (
        "axolotl",
        {"rl": "orpo", "orpo_alpha": 0.2},
        {"train.objective": "orpo", "preference.beta": 0.2},
    ),
    "axolotl, simpo": (
        "axolotl",
        {"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0},
        {"train.objective": "simpo", "preference.beta": 2, "preference.gamma": 1, "preference.nll_weight": 1.0},
    ),
    "axolotl, kto": (
        "axolotl",
        {"rl": "kto", "kto_desirable_weight": 0.2, "adapter": "lora", "lora_r": 8, "lora_dropout": 0.1},
        {
            "train.objective": "kto",
            "data.sequence_length": 1024,
            "preference.desirable_weight": 0.2,
            "lora.dropout": 0.0,
        },
    ),
    "axolotl, reward": (
        "axolotl",
        {"reward_model": True, "num_labels": 1, "center_rewards_coefficient": 0.01}
        | {"adapter": "lora", "lora_r": 8, "lora_dropout": 0.1},
        PAIRS
        | {"lora.dropout": 0.0, "model.residual_dropout": 0.0}
        | {"train.objective": "reward", "model.output_head": "reward", "preference.center_rewards": 0.01},
    ),
    "torchtune, dpo": (
        "torchtune",
        {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.05, "label_smoothing": 0.1}}
        | {"tokenizer": {"max_seq_len": 1024}},
        {"data.sequence_length": 2048, "train.objective": "dpo", "preference.loss": "sigmoid"}
        | {"preference.beta": 0.05, "preference.label_smoothing": 0.1},
    ),
    "torchtune, rso": (
        "torchtune",
        {"loss": {"_component_": "torchtune.rlhf.loss.RSOLoss"}, "ref_checkpointer": {"checkpoint_dir": "other"}},
        {"preference.loss": "hinge", "preference.beta": 0.1, "preference.reference": "hf:other"},
    ),
    "torchtune, simpo": (
        "torchtune",
        {"loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss", "gamma": 1.0}},
        {"train.objective": "simpo", "preference.beta": 2.0, "preference.gamma": 1.0},
    ),
    "LLaMA-Factory, defaults": ("llama-factory", {"stage": "dpo"}, PAIRS | DPO),
    "LLaMA-Factory, hinge": (
        "llama-factory",
        {"stage": "dpo", "pref_loss": "hinge", "pref_ftx": 0.3, "ref_model": "org/ref"},
        DPO | {"preference.loss": "hinge", "preference.nll_weight": 0.3, "preference.reference": "hf:org/ref"},
    ),
    "LLaMA-Factory, orpo with a likelihood": (
        "llama-factory",
        {"stage": "dpo", "pref_loss": "orpo", "pref_ftx": 0.5},
        {"train.objective": "orpo", "preference.nll_weight": 1.5},
    ),
    "LLaMA-Factory, ipo": ("llama-factory", {"stage": "dpo", "pref_loss": "ipo"}, {"train.objective": "ipo"}),
    "LLaMA-Factory, simpo": (
        "llama-factory",
        {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 1.2},
        {"train.objective": "simpo", "preference.gamma": 1.2, "preference.beta": 0.1},
    ),
    "LLaMA-Factory, reward": ("llama-factory", {"stage": "rm"}, PAIRS | {"train.objective": "reward"}),
    "TRL, defaults": (
        "trl-dpo",
        {},
        PAIRS
        | DPO
        | {"optimizer.lr": 1e-6, "train.recompute": "full", "train.epochs": 3, "preference.label_smoothing": 0.0},
    ),
    "TRL, simpo": (
        "trl-cpo",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0},
        PAIRS | {"train.objective": "simpo", "preference.nll_weight": 0, "preference.gamma": 0.5, "preference.beta": 2},
    ),
    "TRL, kto": ("trl-kto", {}, {"train.objective": "kto", "data.sequence_length": 1024, "data.shuffle": False}),
    "TRL, orpo": ("trl-orpo", {"beta": 0.3}, PAIRS | {"train.objective": "orpo", "preference.beta": 0.3}),
    "TRL, reward": ("trl-reward", {}, PAIRS | {"train.objective": "reward", "optimizer.lr": 1e-4}),
    "TRL, a teacher": (
        "trl-gkd",
        {"teacher_model_name_or_path": "org/large", "lmbda": 0.0, "beta": 0.0, "temperature": 2.0},
        {
            **{"train.objective": "distillation", "distillation.divergence": "forward", "distillation.temperature": 2},
            **{"distillation.teacher": "hf:org/large", "data.sequence_length": 1024},
        },
    ),
}
BASICS = {
    "axolotl": {"base_model": "m", "sequence_len": 1024},
    "llama-factory": {"model_name_or_path": "m", "cutoff_len": 1024},
    "torchtune": {"checkpointer": {"checkpoint_dir": "m"}},
}


@pytest.mark.parametrize("name", FIELDS)
def test_objectives_of_other_programs(name):
    """What comes out has the numbers that the other program would train with, also where they are its defaults."""
    project, fields, expected = FIELDS[name]
    options, said = judged(project, BASICS.get(project, {"model_name_or_path": "m"}) | fields)
    assert {option: options.get(option) for option in expected} == expected
    assert not [key for key, (kind, _) in said.items() if kind == "lost"]


@pytest.mark.parametrize(
    ("project", "fields", "says"),
    [
        ("axolotl", {"rl": "grpo"}, "train with TRL, verl, OpenRLHF or NeMo-RL"),
        ("axolotl", {"kd_trainer": True}, "files of a teacher's log-probabilities are not read"),
        ("llama-factory", {"stage": "ppo"}, "train with TRL, verl, OpenRLHF or NeMo-RL"),
        ("llama-factory", {"stage": "dpo", "pref_loss": "kto_pair"}, "use stage: kto"),
        (
            "torchtune",
            {"loss": {"_component_": "torchtune.rlhf.loss.IPOLoss", "tau": 0.1}},
            "are sums over a completion",
        ),
        ("trl-dpo", {"loss_type": "aot"}, "a loss that is not supported"),
        (
            "trl-dpo",
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.0, 1.0]},
            "the weight of sigmoid is 0, which leaves no loss of pairs",
        ),
        ("trl-dpo", {"ld_alpha": 0.5}, "after the shorter completion's length"),
        ("trl-dpo", {"label_smoothing": 0.1}, "TRL 1.16 reads it with robust and exo_pair only"),
        ("axolotl", {"rl": "dpo", "dpo_label_smoothing": 0.1}, "set preference.label_smoothing to smooth sigmoid"),
        ("trl-dpo", {"f_divergence_type": "js_divergence"}, "the divergence reverse_kl"),
        ("trl-gkd", {"lmbda": 0.5}, "train with TRL, verl, OpenRLHF or NeMo-RL"),
    ],
)
def test_what_an_objective_lacks_is_named(project, fields, says):
    _, said = judged(project, BASICS.get(project, {"model_name_or_path": "m"}) | fields)
    assert [why for kind, why in said.values() if kind == "lost" and says in why]


@pytest.mark.parametrize(
    ("project", "fields", "objective"),
    [
        ("trl-dpo", {"loss_type": "aot_pair", "beta": 0.05}, "dpo"),
        ("trl-dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "beta": 0.05}, "dpo"),
        ("trl-kto", {"loss_type": "apo_zero_unpaired"}, "kto"),
        ("trl-cpo", {"loss_type": "alphapo"}, "cpo"),
        ("axolotl", {"rl": "dpo", "dpo_loss_type": ["kto_pair"]}, "dpo"),
        ("llama-factory", {"stage": "dpo", "pref_loss": "kto_pair"}, "dpo"),
    ],
)
def test_a_loss_that_is_missing_leaves_its_objective(project, fields, objective):
    options, said = judged(project, BASICS.get(project, {"model_name_or_path": "m"}) | fields)
    lost = [key for key, (kind, _) in said.items() if kind == "lost"]
    assert options["train.objective"] == objective and options["preference.beta"] and len(lost) == 1


def test_mixtures_of_trl_are_blends():
    """TRL's fraction is a share of the samples; the handbook's weight is one of the records of a dataset."""
    basics, ids = {"model_name_or_path": "m"}, ("org/a", "org/b")
    for entries in ("datasets", "dataset_mixture"):
        fractions = [{"path": name, "fraction": share} for name, share in zip(ids, (0.75, 0.25), strict=True)]
        content = fractions if entries == "datasets" else {"datasets": fractions, "test_split_size": 0.1}
        said = {why for _, why in judged("trl-dpo", basics | {entries: content})[1].values()}
        (why,) = [why for why in said if "megalite prepare" in why and "hf:org/b" in why]
        assert why.count("`megalite prepare --preference") == 2 and "{PREFIX-1: 0.75, PREFIX-2: 0.25}" in why
    handbook = {"datasets": [{"id": "org/a", "config": "c", "weight": 0.5}, {"id": "org/b"}]}
    kind, why = judged("trl-dpo", basics | {"dataset_mixture": handbook})[1]["dataset_mixture.datasets"]
    assert kind == "open" and "{PREFIX-1: 0.5, PREFIX-2: 1}" in why and "hf:org/a:c" in why and "multiply" in why


def test_arguments_of_trls_reference_are_known():
    fields = {"force_use_ref_model": True, "ref_model_init_kwargs": {"dtype": "bfloat16"}}
    _, said = judged("trl-dpo", {"model_name_or_path": "m"} | fields)
    assert "set preference.reference to hf:DIR" in said["force_use_ref_model"][1]
    assert said["ref_model_init_kwargs.dtype"][0] == "harmless"


def test_datasets_that_llama_factory_lists(tmp_path):
    """The command has the file or the name on the Hub, and the names of the columns."""
    listed = {
        "pairs": {
            "file_name": "pairs.json",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": {"messages": "talk"},
        },
        "hub": {
            "hf_hub_url": "org/pairs",
            "subset": "c",
            "ranking": True,
            "columns": {"prompt": "q", "chosen": "good"},
        },
        "talk": {"file_name": "t.json", "formatting": "sharegpt", "tags": {"role_tag": "who", "content_tag": "said"}},
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(listed))
    basics = BASICS["llama-factory"] | {"dataset_dir": str(tmp_path)}

    def said(stage: str, names: str) -> str:
        return judged("llama-factory", basics | {"stage": stage, "dataset": names})[1]["dataset"][1]

    pairs = said("dpo", "pairs, hub")
    assert f"--keys messages=talk --max_length 1024 --too_long truncate --input {tmp_path}/pairs.json " in pairs
    assert "--keys instruction=q,chosen=good" in pairs and "--input hf:org/pairs:c " in pairs and "FILE" not in pairs
    assert f"--chat --keys role=who,content=said --input {tmp_path}/t.json" in said("sft", "talk")
    assert f"megalite prepare --input {tmp_path}/texts.jsonl" in said("pt", "texts")
    assert "--input FILE" in (why := said("sft", "talk,other")) and "lists for other" in why


def test_a_timeout_of_years_is_none():
    content = {"model_name_or_path": "m", "stage": "sft"}
    options, said = judged("llama-factory", content | {"ddp_timeout": 180000000})
    assert "run.timeout" not in options and "keeps its default" in said["ddp_timeout"][1]
    assert judged("llama-factory", content | {"ddp_timeout": 86400})[0]["run.timeout"] == "86400s"


ADAPTERS: dict[str, dict] = {
    "trl-dpo": {"use_peft": True},
    "axolotl": {"adapter": "qlora", "lora_r": 8, "load_in_4bit": True},
    "llama-factory": {"stage": "sft", "quantization_bit": 4},
}
SINGLE = {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}


@pytest.mark.parametrize(
    ("project", "fields", "expected"),
    [
        ("trl-dpo", {"load_in_4bit": True}, ("nf4", False)),
        ("trl-dpo", {"load_in_4bit": True, "use_bnb_nested_quant": True}, ("nf4", True)),
        ("trl-dpo", {"load_in_8bit": True}, ("int8", None)),
        ("trl-dpo", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, ("fp4", False)),
        ("trl-dpo", {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "codes of int4 are not supported"),
        ("trl-dpo", {"load_in_4bit": True, "use_peft": False}, "only frozen weights under adapters"),
        ("axolotl", {}, ("nf4", True)),
        ("axolotl", SINGLE, ("nf4", False)),
        ("axolotl", {"bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}}, ("fp4", True)),
        ("axolotl", {"adapter": "lora"}, ("fp4", False)),
        ("axolotl", {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True}, ("int8", None)),
        ("llama-factory", {}, ("nf4", True)),
        ("llama-factory", {"double_quantization": False, "quantization_method": "bnb"}, ("nf4", False)),
        ("llama-factory", {"quantization_bit": 8}, ("int8", None)),
        ("llama-factory", {"quantization_method": "hqq"}, "this quantization is not supported"),
        ("llama-factory", {"quantization_type": "fp4"}, ("fp4", True)),
        ("torchtune", {"model": {"lora_rank": 8, "quantize_base": True}}, ("nf4", True)),
    ],
)
def test_the_base_under_adapters_has_the_form_of_the_other_project(project, fields, expected):
    content = BASICS.get(project, {"model_name_or_path": "m"}) | ADAPTERS.get(project, {}) | fields
    options, said = judged(project, content)
    form = (options.get("lora.base"), options.get("lora.double_quant"))
    lost = [why for kind, why in said.values() if kind == "lost"]
    if isinstance(expected, str):
        assert form == (None, None) and [why for why in lost if expected in why]
    else:
        assert form == expected and not lost


@pytest.mark.parametrize("project", ["trl-dpo", "trl-kto", "trl-reward"])
def test_no_limit_of_trl_is_no_default(project):
    """max_length: null, for which a row is as long as the data needs."""
    content = {"model_name_or_path": "m", "dataset_name": "org/pairs"}
    options, said = judged(project, content | {"max_length": None})
    assert "data.sequence_length" not in options and "--max_length" not in said["dataset_name"][1]
    assert said["max_length"][0] == "open" and "that `megalite prepare` prints" in said["max_length"][1]
    options, said = judged(project, content)
    assert (
        said["max_length"] == ("assumed", "default of the project") and "--max_length 1024" in said["dataset_name"][1]
    )


def test_trainers_that_generate_are_rejected_in_one_message():
    with pytest.raises(ConfigError, match="Arguments of TRL: losses that generate text .* NeMo-RL"):
        convert({"per_device_train_batch_size": 4, "num_generations": 8})
    with pytest.raises(ConfigError, match="one of: trl-dpo, trl-kto"):
        convert({"per_device_train_batch_size": 4, "beta": 0.1})
