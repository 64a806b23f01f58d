"""tools/import_config.py on files as people have them: what the emitted configuration says once it is loaded, and that
no key gets lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.commands.import_config import main
from megalite.config.errors import ConfigError
from megalite.config.values import nest
from megalite.importers.convert import convert
from tests.importers.imported import leaves, load

TOOL = Path(__file__).resolve().parents[2] / "tools" / "import_config.py"
ADAMW = {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "eps": 1e-9, "weight_decay": 0.05}}
ADAMW_OPTIONS = {
    "optimizer.lr": 2e-4,
    "optimizer.betas": [0.9, 0.98],
    "optimizer.eps": 1e-9,
    "optimizer.weight_decay": 0.05,
}
DYNAMIC = {"loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 3, "min_loss_scale": 2}
DYNAMIC_OPTIONS = {
    "fp16.loss_scale_window": 500,
    "fp16.initial_scale_power": 12,
    "fp16.hysteresis": 3,
    "fp16.min_loss_scale": 2,
}
NO_CLIP, NO_ZERO, NO_OFFLOAD = {"train.grad_clip": 0}, {"parallel.zero": 0}, {"parallel.offload": "none"}

TRAINER_ZERO3 = {
    "fp16": {"enabled": "auto", **DYNAMIC},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
TRAINER_OPTIONS = {
    **{"parallel.zero": 3, "parallel.offload": "cpu", "parallel.offload_parameters": True},
    **{**DYNAMIC_OPTIONS, "optimizer.decay": "constant", "logging.interval": 2000},
}
PLAIN_ZERO2 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "buffer_count": 4,
            "pin_memory": True,
            "ratio": 0.3,
        },
        "allgather_partitions": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e7,
        "zero_quantized_gradients": True,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 128},
    "gradient_clipping": 0.5,
    "communication_data_type": "bf16",
    "optimizer": ADAMW,
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 100,
            "total_num_steps": 1e3,
            "warmup_type": "linear",
        },
    },
    "tensorboard": {"enabled": True, "output_path": "/logs"},
    "sparse_attention": {"mode": "fixed"},
}
PLAIN_OPTIONS = {
    **{
        "parallel.zero": 2,
        "parallel.offload": "disk",
        "parallel.offload_dir": "/local_nvme",
        "parallel.reduce_dtype": "bf16",
    },
    **{
        "parallel.bucket_mb": 200,
        "train.global_batch_size": 64,
        "train.micro_batch_size": 4,
        "train.precision": "bf16",
    },
    **{"train.grad_clip": 0.5, "train.steps": 1000, **ADAMW_OPTIONS, "optimizer.lr": 3e-4},
    **{"optimizer.warmup_steps": 100, "optimizer.decay": "linear", "logging.tensorboard": True},
}
PLAIN_LOST = {
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.zero_quantized_gradients",
    "tensorboard.output_path",
    "sparse_attention.mode",
}
LAUNCHED = {
    **{"compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "enable_cpu_affinity": False},
    **{
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
        "num_processes": 8,
        "rdzv_backend": "static",
    },
    **{
        "same_network": True,
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": False,
        "mixed_precision": "bf16",
    },
}
FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
    "fsdp_activation_checkpointing": True,
}
FSDP_OPTIONS = {"parallel.dp": 8, "train.precision": "bf16", "train.recompute": "full"}
PLUGIN = {
    **{
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/nvme",
    },
    **{
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    },
}


def fsdp(**section: Any) -> dict[str, Any]:
    return {
        **LAUNCHED,
        "distributed_type": "FSDP",
        "fsdp_config": {**FSDP, **{f"fsdp_{key}": value for key, value in section.items()}},
    }


def sizes(**section: int) -> dict[str, Any]:
    return {"parallelism_config": {f"parallelism_config_{key}_size": size for key, size in section.items()}}


FILES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {  # content, options, keys that are not honoured
    "Trainer, ZeRO-3, auto": (TRAINER_ZERO3, TRAINER_OPTIONS, set()),
    "DeepSpeed, ZeRO-2 with offload": (PLAIN_ZERO2, PLAIN_OPTIONS, PLAIN_LOST),
    "DeepSpeed, fp16": (
        {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 8,
            "fp16": {"enabled": True, **DYNAMIC, "loss_scale": 1024},
        },
        {
            "train.global_batch_size": 8,
            "train.micro_batch_size": 8,
            "train.precision": "fp16",
            **DYNAMIC_OPTIONS,
            **NO_CLIP,
            **NO_ZERO,
        },
        {"fp16.loss_scale"},
    ),
    "DeepSpeed, defaults of what is chosen": (
        {
            "gradient_clipping": 1.0,
            "zero_optimization": {},
            "optimizer": {"type": "Adam"},
            "scheduler": {"type": "WarmupCosineLR"},
        },
        {
            **{
                "train.grad_clip": 1,
                **NO_ZERO,
                "optimizer.lr": 1e-3,
                "optimizer.betas": [0.9, 0.999],
                "optimizer.eps": 1e-8,
            },
            **{
                "optimizer.weight_decay": 0,
                "optimizer.decay": "cosine",
                "optimizer.warmup_steps": 1000,
                "optimizer.min_lr": 1e-7,
            },
        },
        set(),
    ),
    "DeepSpeed, another optimizer": (
        {
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "max_coeff": 10}},
            "zero_optimization": True,
        },
        {"train.grad_clip": 1, "parallel.zero": 1},
        {"optimizer.type", "optimizer.params.lr", "optimizer.params.max_coeff"},
    ),
    "DeepSpeed, old names": (
        {
            "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True},
            "bfloat16": {"enabled": True},
        },
        {
            **NO_CLIP,
            "parallel.zero": 3,
            "parallel.offload": "cpu",
            "parallel.offload_parameters": True,
            "train.precision": "bf16",
        },
        set(),
    ),
    "DeepSpeed, values that do not fit": (
        {
            "train_batch_size": "many",
            "gradient_clipping": -1,
            "zero_optimization": {"stage": 7, "offload_optimizer": {"device": "hpu"}, "mics_shard_size": 0},
            "bf16": {"enabled": "yes"},
            "data_types": {"grad_accum_dtype": "bf16"},
            "steps_per_print": 2.5,
        },
        {},
        {
            *(
                "train_batch_size",
                "gradient_clipping",
                "zero_optimization.stage",
                "zero_optimization.offload_optimizer.device",
            ),
            *("zero_optimization.mics_shard_size", "bf16.enabled", "data_types.grad_accum_dtype", "steps_per_print"),
        },
    ),
    "DeepSpeed, parameters offloaded in stage 2": (
        {"gradient_clipping": 1, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"train.grad_clip": 1, "parallel.zero": 2},
        {"zero_optimization.offload_param.device"},
    ),
    "Accelerate, FSDP": (
        fsdp(sharding_strategy="FULL_SHARD", offload_params=False),
        FSDP_OPTIONS | NO_OFFLOAD | {"parallel.zero": 3},
        set(),
    ),
    "Accelerate, FSDP with offload": (
        fsdp(sharding_strategy=1, offload_params=True),
        FSDP_OPTIONS | {"parallel.zero": 3, "parallel.offload": "cpu", "parallel.offload_parameters": True},
        set(),
    ),
    "Accelerate, FSDP, optimizer alone": (
        fsdp(sharding_strategy="SHARD_GRAD_OP", offload_params=True),
        FSDP_OPTIONS | {"parallel.zero": 2, "parallel.offload": "cpu"},
        set(),
    ),
    "Accelerate, FSDP by default": (fsdp(), FSDP_OPTIONS | {"parallel.zero": 3}, set()),
    "Accelerate, FSDP, NO_SHARD": (fsdp(sharding_strategy="NO_SHARD"), FSDP_OPTIONS | NO_ZERO, set()),
    "Accelerate, FSDP, HYBRID_SHARD": (
        fsdp(sharding_strategy="HYBRID_SHARD") | {"num_machines": 2, "num_processes": 16},
        FSDP_OPTIONS | {"parallel.zero": 3, "parallel.dp": 16, "parallel.dp_shard": 8},
        set(),
    ),
    "Accelerate, FSDP, 5 on one machine": (fsdp(sharding_strategy=5), FSDP_OPTIONS | {"parallel.zero": 2}, set()),
    "Accelerate, FSDP2": (fsdp(version=2, reshard_after_forward=True), FSDP_OPTIONS | {"parallel.zero": 3}, set()),
    "Accelerate, FSDP2 without resharding": (
        fsdp(version=2, reshard_after_forward=False),
        FSDP_OPTIONS | {"parallel.zero": 2},
        set(),
    ),
    "Accelerate, FSDP2 with tensor parallel": (
        fsdp(version=2, reshard_after_forward=True) | sizes(tp=2, dp_shard=4),
        FSDP_OPTIONS | {"parallel.zero": 3, "parallel.tp": 2, "parallel.dp": 4, "parallel.dp_shard": 4},
        set(),
    ),
    "Accelerate, FSDP2 with tensor and context parallel": (
        fsdp(version=2, reshard_after_forward=True)
        | sizes(dp_shard=2, tp=2, cp=2)
        | {"gradient_accumulation_steps": 4},
        FSDP_OPTIONS
        | {
            "parallel.zero": 3,
            "parallel.tp": 2,
            "parallel.cp": 2,
            "parallel.context": "gather",
            "parallel.dp": 2,
            "parallel.dp_shard": 4,
        },
        {"gradient_accumulation_steps"},
    ),
    "Accelerate, HSDP": (
        fsdp(version=2, reshard_after_forward=True) | sizes(dp_replicate=2, dp_shard=2, tp=2),
        FSDP_OPTIONS | {"parallel.zero": 3, "parallel.tp": 2, "parallel.dp": 4, "parallel.dp_shard": 2},
        set(),
    ),
    "Accelerate, FSDP, unknown strategy": (
        fsdp(sharding_strategy="SOME_SHARD", min_num_params=100),
        FSDP_OPTIONS,
        {"fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_min_num_params"},
    ),
    "Accelerate, DEEPSPEED": (
        {**LAUNCHED, "distributed_type": "DEEPSPEED", "deepspeed_config": PLUGIN},
        {
            **{"parallel.dp": 8, "parallel.zero": 3, "parallel.offload": "cpu", "parallel.offload_parameters": True},
            **{"train.precision": "bf16", "train.grad_clip": 1},
        },
        {"deepspeed_config.gradient_accumulation_steps"},
    ),
    "Accelerate, MULTI_GPU": (
        {**LAUNCHED, "distributed_type": "MULTI_GPU", "gpu_ids": "all", "mixed_precision": "fp16", "fsdp_config": FSDP},
        {"parallel.dp": 8, "parallel.zero": 0, "train.precision": "fp16"},
        set(),
    ),
    "Accelerate, MULTI_CPU": (
        {
            **LAUNCHED,
            "distributed_type": "MULTI_CPU",
            "use_cpu": True,
            "mixed_precision": "no",
            "ipex_config": {"ipex": False},
        },
        {"parallel.dp": 8, "parallel.zero": 0, "train.precision": "fp32"},
        {"use_cpu", "ipex_config.ipex"},
    ),
    "Accelerate, NO": (
        {
            **LAUNCHED,
            "distributed_type": False,
            "num_processes": 1,
            "mixed_precision": False,
            "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        },
        {"parallel.dp": 1, "train.precision": "fp32", "train.compile": True},
        set(),
    ),
    "Accelerate, for TPUs": (
        {**LAUNCHED, "distributed_type": "XLA", "mixed_precision": "fp8", "tpu_name": "v5"},
        {},
        {"distributed_type", "num_processes", "mixed_precision", "tpu_name"},
    ),
}


@pytest.fixture
def tool(monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """tool(*arguments) → what it prints on stdout and stderr."""

    def call(*arguments: object) -> tuple[str, str]:
        main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def write(content: dict[str, Any], directory: Path, name: str = "") -> Path:
    """A DeepSpeed configuration as JSON, any other as YAML."""
    path = directory / (name or ("config.yaml" if "distributed_type" in content else "ds_config.json"))
    path.write_text(yaml.safe_dump(content) if path.suffix == ".yaml" else json.dumps(content, indent=4))
    return path


@pytest.mark.parametrize("name", FILES)
def test_the_emitted_file_says_what_the_file_says(capsys, tmp_path, name):
    content, expected, not_honoured = FILES[name]
    path, emitted = write(content, tmp_path), tmp_path / "emitted.yaml"
    with nullcontext() if expected else pytest.raises(SystemExit, match="2"):
        main([str(path)])
    out, err = capsys.readouterr()
    emitted.write_text(out)
    tree = yaml.safe_load(out)
    assert set(leaves(tree)) == set(expected), "only what the file decides"
    config = load(emitted, expected)
    assert {option: attrgetter(option)(config) for option in expected} == expected

    with nullcontext() if expected else pytest.raises(SystemExit, match="2"):
        main([str(path), "--json"])
    reported = json.loads(capsys.readouterr().out)
    assert reported["config"] == tree
    assert bool(expected) != ("could be imported. Set" in err)
    assert {lost["key"] for lost in reported["not_honoured"]} == not_honoured
    assert all(
        f"{remark['key']} = " in err and remark["why"] in err for remark in reported["not_honoured"] + reported["notes"]
    )
    accounted = {*reported["honoured"], *(remark["key"] for remark in reported["not_honoured"] + reported["notes"])}
    assert set(leaves(content)) <= accounted


POOL: dict[str, list[Any]] = {
    "train_batch_size": [32, "auto", None, "x"],
    "train_micro_batch_size_per_gpu": [4, 1, "auto"],
    "gradient_accumulation_steps": [1, 2, "auto"],
    "gradient_clipping": [0, 1.0, -1, "auto", []],
    "zero_optimization.stage": [0, 1, 2, 3, 4, "auto"],
    "zero_optimization.offload_optimizer.device": ["none", "cpu", "nvme", "tape"],
    "zero_optimization.offload_optimizer.nvme_path": ["/nvme", 7],
    "zero_optimization.offload_param.device": ["none", "cpu", "nvme"],
    "zero_optimization.reduce_bucket_size": [5e8, 0, "auto"],
    "zero_optimization.mics_shard_size": [-1, 2, 4],
    "zero_optimization.new_key": [True],
    "fp16.enabled": [True, False, "auto"],
    "fp16.hysteresis": [2, 0],
    "fp16.loss_scale": [0, 128.0],
    "bf16.enabled": [True, False, "auto"],
    "data_types.grad_accum_dtype": ["bf16", "fp32", "fp16"],
    "communication_data_type": ["bf16", "fp32", "fp16"],
    "optimizer.type": ["Adam", "AdamW", "Lamb"],
    "optimizer.params.lr": [1e-3, "auto", -1],
    "optimizer.params.betas": [[0.9, 0.95], [0.9], "auto"],
    "optimizer.params.max_grad_norm": [1.0],
    "scheduler.type": ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"],
    "scheduler.params.warmup_max_lr": [1e-3, "auto"],
    "scheduler.params.warmup_num_steps": [100, 1e3, "auto"],
    "scheduler.params.total_num_steps": [500, 5000, "auto"],
    "scheduler.params.cos_min_ratio": [0.1, 2],
    "curriculum_learning.enabled": [True, False],
    "curriculum_learning.min_difficulty": [8],
    "flops_profiler": [{}],
}


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch(*sizes: Any) -> dict[str, Any]:
    return {key: size for key, size in zip(BATCH, sizes, strict=True) if size is not None}


def tree_of(choice: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in choice.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in POOL.items()}),
    st.sampled_from([None, 2]),
)
def test_no_key_is_dropped_and_what_comes_out_is_accepted(tmp_path_factory, choice, dp):
    try:
        imported = convert(tree_of(choice | {"zero_allow_untested_optimizer": True, "train_batch_size": 32}), dp)
    except ConfigError as error:
        assert "Correct one of them" in str(error)
        return
    assert set(choice) <= {*imported.honoured, *(remark.key for remark in imported.remarks)}
    assert {option for options in imported.honoured.values() for option in options} == set(imported.options)
    path = tmp_path_factory.mktemp("emitted") / "config.yaml"
    path.write_text(yaml.safe_dump(nest(imported.options)))
    config = load(path, imported.options)
    assert {option: attrgetter(option)(config) for option in imported.options} == imported.options


@pytest.mark.parametrize(
    ("sizes", "dp", "expected", "lost"),
    [
        ((64, 4, None), None, (64, 4), False),
        ((64, 4, 2), 8, (64, 4), False),
        ((None, 4, 2), 8, (64, 4), False),
        ((64, None, 2), 8, (64, 4), False),
        ((64, None, None), 8, (64, 8), False),
        ((None, 4, None), 8, (32, 4), False),
        ((64, "auto", "auto"), 8, (64, None), False),
        ((64, "auto", 2), 8, (64, None), True),
        ((None, 4, 2), None, (None, 4), True),
        ((64, None, 2), None, (64, None), True),
        ((None, None, 2), 8, (None, None), True),
    ],
)
def test_batch_sizes_are_those_that_deepspeed_infers(sizes, dp, expected, lost):
    """train = micro * accumulation * ranks: what is known of them gives the rest; lost: the accumulation decides
    nothing yet."""
    imported = convert({"gradient_clipping": 1.0, **batch(*sizes)}, dp)
    assert tuple(map(imported.options.get, ("train.global_batch_size", "train.micro_batch_size"))) == expected
    assert (BATCH[2] in [remark.key for remark in imported.remarks if remark.kind == "lost"]) == lost


@pytest.mark.parametrize(
    ("sizes", "dp"), [((64, 4, 3), None), ((64, 4, 2), 4), ((60, 8, None), None), ((64, None, None), 3)]
)
def test_batch_sizes_that_can_not_hold_are_refused(sizes, dp):
    with pytest.raises(ConfigError, match=rf"train_batch_size={sizes[0]} must be .* = .*\d\. Correct one of them"):
        convert(batch(*sizes), dp)


def test_the_learning_rate_is_the_schedules_where_that_has_one():
    """As in DeepSpeed: WarmupDecayLR replaces the optimizer's rate by its own, given or default; WarmupCosineLR only
    scales it."""

    def options(scheduler: str, **params: Any) -> dict[str, Any]:
        return convert({"optimizer": ADAMW, "scheduler": {"type": scheduler, "params": params}}).options

    assert options("WarmupLR")["optimizer.lr"] == 2e-4
    assert options("WarmupLR", warmup_max_lr=5e-4)["optimizer.lr"] == 5e-4
    assert options("WarmupDecayLR")["optimizer.lr"] == 1e-3
    assert options("WarmupDecayLR", warmup_max_lr="auto")["optimizer.lr"] == 2e-4
    assert options("WarmupCosineLR", cos_min_ratio=0.1)["optimizer.min_lr"] == pytest.approx(2e-5)


def test_muon_has_rates_of_its_own():
    """As in DeepSpeed: muon_lr and adam_lr replace lr for the tensors of each."""

    def options(**params: Any) -> dict[str, Any]:
        imported = convert({"optimizer": {"type": "Muon", "params": params}}).options
        return {name: value for name, value in imported.items() if name.startswith(("muon.", "optimizer."))}

    assert options(lr=2e-2, momentum=0.9) == {
        "optimizer.name": "muon",
        "optimizer.lr": 2e-2,
        "muon.lr": 2e-2,
        "muon.momentum": 0.9,
    }
    assert options(lr=1.0, muon_lr=2e-2, adam_lr=3e-4) == {
        "optimizer.name": "muon",
        "optimizer.lr": 3e-4,
        "muon.lr": 2e-2,
    }
    assert options(weight_decay=0.2) == {
        "optimizer.name": "muon",
        "optimizer.weight_decay": 0.2,
        "muon.weight_decay": 0.2,
    }


def test_what_the_file_leaves_to_deepspeeds_defaults_is_said():
    """Defaults that are not ours are taken over; a logarithmic warm-up cannot be; those that change nothing go without
    a word."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 50}}
    imported = convert(
        {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "Adam", "params": ADAMW["params"]},
            "scheduler": schedule,
        }
    )
    said = {(remark.key, remark.value): remark.kind for remark in imported.remarks}
    assert said == {
        ("gradient_clipping", 0): "assumed",
        ("optimizer.type", "Adam"): "harmless",
        ("optimizer.params.lr", 2e-4): "harmless",
        ("optimizer.params.weight_decay", 0.05): "approximate",
        ("scheduler.params.warmup_max_lr", 1e-3): "assumed",
        ("scheduler.params.warmup_type", "log"): "approximate",
    }


def test_a_deepspeed_file_is_read_from_beside_the_file_that_names_it(tool, tmp_path):
    (tmp_path / "inner").mkdir()
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "invented": 1}
    write(sizes | {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}, tmp_path / "inner")
    section = {"deepspeed_config_file": "inner/ds_config.json", "zero3_init_flag": False}
    path = write({**LAUNCHED, "distributed_type": "DEEPSPEED", "deepspeed_config": section}, tmp_path)
    content = json.loads(tool(path, "--json")[0])
    assert content["config"]["train"] == {
        "global_batch_size": 2 * 4 * 8,
        "micro_batch_size": 2,
        "precision": "bf16",
        "grad_clip": 0,
    }
    assert content["config"]["parallel"] == {"dp": 8, "zero": 1}
    assert [lost["key"] for lost in content["not_honoured"]] == ["inner/ds_config.json: invented"]

    (tmp_path / "inner" / "ds_config.json").unlink()
    with pytest.raises(SystemExit) as ended:
        tool(path)
    assert ended.value.code == 2


def test_the_batch_and_the_sharding_of_parallelism_config_are_kept_or_named():
    """Ranks of a tp or cp group read the same rows: 8 processes are 2 data-parallel ranks."""
    content = (
        fsdp(version=2, reshard_after_forward=True) | sizes(dp_shard=2, tp=2, cp=2) | {"gradient_accumulation_steps": 4}
    )
    imported = convert(content)
    assert (
        imported.options["parallel.dp"],
        imported.options["parallel.dp_shard"],
        imported.options["parallel.tp"],
    ) == (
        2,
        4,
        2,
    ), "shards span cp"
    why = {remark.key: remark.why for remark in imported.remarks if remark.kind == "lost"}
    assert imported.options["parallel.cp"] == 2
    formula = "set train.global_batch_size to train.micro_batch_size * 4 * 2"
    assert formula in why["gradient_accumulation_steps"]
    nested = fsdp(version=2, gradient_accumulation_steps=4)["fsdp_config"] | {"gradient_accumulation_steps": 4}
    del nested["fsdp_gradient_accumulation_steps"]
    assert formula in str(convert(content | {"fsdp_config": nested}).remarks)
    with pytest.raises(ConfigError, match=r"num_processes=8 does not match .* Correct one of them"):
        convert(fsdp(version=2) | sizes(dp_shard=2, tp=2))


def test_what_is_still_to_be_set_is_said(tool, tmp_path):
    """A warm-up that is longer than the default run is kept, and refused where the file says how long the run is."""
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 500}}
    content = json.loads(tool(write({"scheduler": scheduler, "train_batch_size": 32}, tmp_path), "--json")[0])
    assert content["config"]["optimizer"]["warmup_steps"] == 500
    assert any(note["kind"] == "open" and "train.steps = 100" in note["why"] for note in content["notes"])

    scheduler["params"]["total_num_steps"] = 400
    content = json.loads(tool(write({"scheduler": scheduler, "train_batch_size": 32}, tmp_path), "--json")[0])
    assert "warmup_steps" not in content["config"]["optimizer"]
    assert [lost["key"] for lost in content["not_honoured"]] == ["scheduler.params.warmup_num_steps"]


def test_ranks_given_by_hand_complete_the_batch(tool, tmp_path):
    path = write(
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1}, tmp_path
    )
    assert "set train.global_batch_size to 4 * 2 * parallel.dp" in tool(path)[1]
    assert yaml.safe_load(tool(path, "--dp", 16)[0])["train"] == {
        "global_batch_size": 128,
        "micro_batch_size": 4,
        "grad_clip": 1,
    }


BAD = {
    "ds.json": ("{", "is not valid JSON"),
    "twice.json": ('{"fp16": {"enabled": true, "enabled": false}}', "the key enabled appears twice"),
    "other.json": (
        '{"hidden_size": 8}',
        "one of: accelerate, torchtitan, megatron, axolotl, llama-factory, torchtune, deepspeed, trl-dpo, ",
    ),
    "list.json": ("[1]", "Could not recognize the project"),
    "broken.toml": ("[training", "is not valid TOML"),
    "quotes.sh": ("pretrain_gpt.py --lr '1", "unterminated quote in line 1"),
    "empty.sh": ("echo nothing", "No training command"),
    "broken.yaml": ("a: [", "is not valid YAML"),
    "twice.yaml": ("base_model: a/b\nseed: 1\nseed: 2\n", "the key seed appears twice in line 1"),
    "two.yaml": (
        "base_model: a/b\n---\nseed: 1\n",
        "expected a single document in the stream, but found another document in line 2",
    ),
    "alias.yaml": ("base_model: *missing\n", "found undefined alias 'missing' in line 1"),
    "tag.yaml": ("base_model: !!python/name:os.system\n", "could not determine a constructor for the tag"),
    "empty.yaml": ("", "Could not recognize the project"),
    "comment.json": (
        '{"bf16": {"enabled": true}, // no end\n',
        "is not valid JSON: Expecting property name enclosed in double quotes: line 2",
    ),
    "twice_commented.json": (
        '{"steps_per_print": 1, # one\n"steps_per_print": 2}',
        "the key steps_per_print appears twice",
    ),
    "ours.yaml": ("optimizer:\n  lr: 1.0e-3\nfp16:\n  hysteresis: 2\n", "Pass the project before the file"),
    "both.json": (
        '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        "fp16.enabled and bf16.enabled are inconsistent",
    ),
    "linked.yaml": (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: 5\n",
        "be read: No such file",
    ),
    "missing.json": (None, "be read: No such file"),
    "missing.yaml": (None, "be read: No such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_one_message(tool, tmp_path, capsys, name):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as ended:
        tool(tmp_path / name)
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


COMMENTED = """// sizes of one node
{ "train_batch_size": 16, /* over
all ranks */ "wandb": {"enabled": true, "project": "a//b # c"}, # by hand
  "optimizer": {"type": "AdamW", "params": {"lr": "2e-5", "betas": ["0.9", 0.99,],},}, }
"""


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_json_may_have_comments_and_last_commas(tool, tmp_path, start):
    """As in DeepSpeed, which reads its files as Hjson; text in quotes stays as it is."""
    (tmp_path / "ds.json").write_text(start + COMMENTED, encoding="utf-8")
    content = json.loads(tool(tmp_path / "ds.json", "--json")[0])["config"]
    assert content["train"]["global_batch_size"] == 16 and content["logging"] == {"wandb": "a//b # c"}
    assert (content["optimizer"]["lr"], content["optimizer"]["betas"]) == (2e-5, [0.9, 0.99])


TEXTS = {
    "axolotl": (
        {
            **{
                "base_model": "m",
                "micro_batch_size": "2",
                "learning_rate": "2e-5",
                "gradient_checkpointing": "True",
                "num_epochs": "3",
            },
            **{
                "val_set_size": "0.05",
                "warmup_ratio": "0.1",
                "seed": "42",
                "wandb_name": "007",
                "run_name": 2024,
                "lr_scheduler": None,
            },
        },
        {
            **{
                "train.micro_batch_size": 2,
                "optimizer.lr": 2e-5,
                "train.recompute": "full",
                "train.epochs": 3,
                "data.validation": 0.05,
            },
            **{"optimizer.warmup_steps": "10%", "run.seed": 42, "optimizer.decay": "cosine", "run.name": "007"},
        },
    ),
    "llama-factory": (
        {
            **{
                "model_name_or_path": "m",
                "finetuning_type": "full",
                "per_device_train_batch_size": "2",
                "bf16": "true",
            },
            **{
                "gradient_accumulation_steps": "8",
                "max_steps": "-1",
                "packing": "false",
                "disable_gradient_checkpointing": "true",
            },
            **{"run_name": 2024, "ddp_timeout": "180", "num_train_epochs": None},
        },
        {
            **{
                "train.global_batch_size": 2 * 8 * 4,
                "train.precision": "bf16",
                "data.packing": False,
                "train.recompute": "none",
            },
            **{"run.name": "2024", "run.timeout": "180s", "train.epochs": 3},
        },
    ),
    "torchtune": (
        {
            **{
                "batch_size": "2",
                "gradient_accumulation_steps": None,
                "dtype": "bf16",
                "compile": "False",
                "clip_grad_norm": None,
            },
            **{
                "optimizer": {"_component_": "torch.optim.AdamW", "lr": "3e-4", "weight_decay": None},
                "seed": None,
                "shuffle": "true",
            },
        },
        {
            **{"train.global_batch_size": 2 * 4, "train.compile": False, "train.grad_clip": 0, "optimizer.lr": 3e-4},
            **{"optimizer.weight_decay": 0.01, "data.shuffle": True, "run.seed": None},
        },
    ),
    "accelerate": (
        {
            **{"distributed_type": "fsdp", "num_processes": "8", "mixed_precision": "bf16"},
            "fsdp_config": {
                "fsdp_sharding_strategy": "1",
                "fsdp_offload_params": "false",
                "fsdp_activation_checkpointing": "True",
            },
        },
        {"parallel.dp": 8, "parallel.zero": 3, "parallel.offload": "none", "train.recompute": "full"},
    ),
}


@pytest.mark.parametrize("project", TEXTS)
def test_quoted_values_and_empty_keys_are_what_their_project_reads(project):
    """A number or a switch in quotes is its value, a name of digits stays text, and an empty key has its default."""
    content, expected = TEXTS[project]
    imported = convert(content, 4, project=project)
    assert {option: imported.options.get(option) for option in expected} == expected
    assert not [remark for remark in imported.remarks if remark.kind == "lost"]


@pytest.mark.parametrize("value", ["${OUT}/runs", "${oc.env:OUT,/tmp}/runs"])
@pytest.mark.parametrize("project", ["axolotl", "llama-factory", "torchtune"])
def test_a_value_from_outside_the_file_is_asked_for(project, value):
    imported = convert({"output_dir": value}, project=project)
    (remark,) = (remark for remark in imported.remarks if remark.key == "output_dir")
    assert "run.dir" not in imported.options and remark.kind == "open"
