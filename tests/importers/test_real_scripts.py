"""Launch scripts and lists of arguments of Megatron-LM and its kin, as people have them: what they must give, judged by
hand.

Sources and what is peculiar to each file: tests/importers/real_files/README.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megalite.commands.import_config import main
from tests.importers.imported import reported

FOLDER = Path(__file__).parent / "real_files" / "megatron"
GPT = {
    "model.position": "learned",
    "model.norm": "layer",
    "model.hidden_act": "gelu_pytorch_tanh",
    "model.attention_dropout": 0.1,
}
LLAMA = {
    "model.position": "rope",
    "model.norm": "rms",
    "model.hidden_act": "silu",
    "model.gated_mlp": True,
    "model.mlp_bias": False,
}
ABSENT = "absent"


class Verdict(NamedTuple):
    """The options that matter, the keys that are not honoured, and those left open with a part of the reason; ranks:
    --dp, if given."""

    options: dict[str, Any]
    lost: set[str] = set()
    open: dict[str, str] = {}
    ranks: int | None = None


EXPERTS = {
    "model.num_experts": 16,
    "model.num_experts_per_tok": 4,
    "model.moe_intermediate_size": 512,
    "model.router_balance": "bias",
}
FILES: dict[str, Verdict] = {
    "arrays_fp8.sh": Verdict(
        LLAMA
        | {
            "model.num_hidden_layers": 12,
            "model.num_key_value_heads": 4,
            "model.vocab_size": 32000,
            "run.dir": "ckpt/small_llama",
        }
        | {
            "parallel.tp": 2,
            "parallel.dp": 4,
            "parallel.zero": 1,
            "parallel.sequence_parallel": True,
            "train.grad_dtype": "bf16",
        }
        | {"train.steps": 2000, "optimizer.warmup_steps": 20, "train.global_batch_size": 32, "data.validation": ABSENT},
        {"decoupled-lr", "fp8-format", "fp8-amax-history-len"},
        {"mock-data": "set data.train"},
    ),
    "positional.sh": Verdict(
        GPT
        | {"model.intermediate_size": 4 * 2048, "model.tie_word_embeddings": True, "parallel.dp": 2, "parallel.zero": 0}
        | {
            "train.rampup_batch_size": [16, 16, 5000],
            "optimizer.warmup_steps": 30,
            "data.validation": 0.05,
            "run.dir": ABSENT,
        },
        {"lr-decay-iters"},
        dict.fromkeys(("load", "save", "data-path", "tensorboard-dir"), "an argument of the script"),
    ),
    "option_parser.sh": Verdict(
        {
            "run.dir": "NOT_GIVEN",
            "parallel.pp": 4,
            "parallel.dp": 1,
            "model.sliding_window": 128,
            "model.hidden_act": ABSENT,
        }
        | {
            "model.sliding_window_layers": [0, 2, 4, 6],
            "model.router_aux_loss_coef": 0.004,
            "parallel.sequence_parallel": ABSENT,
        },
        {"glu-linear-offset", "softmax-type", "quick-geglu"},
        {"mock-data": "set data.train"},
    ),
    "hybrid_case.sh": Verdict(
        {
            "model.position": "none",
            "model.hidden_size": 768,
            "train.global_batch_size": 32,
            "train.steps": 10000,
            "parallel.dp": 8,
        }
        | {
            "model.layer_blocks": ["mamba", "feed_forward", "mamba", "feed_forward", "attention", "feed_forward"] * 2,
            "model.mamba_num_heads": 24,
        },
        set(),
        {"data-path": "an argument of the script"},
    ),
    "latent_fsdp.sbatch": Verdict(
        LLAMA
        | EXPERTS
        | {
            "model.kv_lora_rank": 128,
            "model.qk_nope_head_dim": 64,
            "model.rope_scaling": ABSENT,
            "model.head_dim": ABSENT,
        }
        | {"model.mlp_only_layers": [0], "model.mtp_layers": 1, "train.mtp_weight": 0.1, "model.norm_topk_prob": ABSENT}
        | {
            "parallel.zero": 3,
            "parallel.ep": 4,
            "train.steps": 1000,
            "train.stop_after": "220m",
            "run.dir": "out/checkpoints",
        },
        {"recompute-modules", "moe-aux-loss-coeff"},
        {"data-path": "placeholder"},
        ranks=32,
    ),
    "stages/table.sh": Verdict(
        GPT
        | {
            "model.num_hidden_layers": 24,
            "model.hidden_size": 2048,
            "parallel.tp": 4,
            "parallel.pp": 4,
            "parallel.virtual_stages": 2,
        }
        | {
            "train.micro_batch_size": 2,
            "train.global_batch_size": 96,
            "train.recompute": "full",
            "optimizer.warmup_steps": 4,
        },
        {"loss-scale"},
        {"data-path": "placeholder"},
    ),
    "stages/parameters.sh": Verdict(
        {
            "model.hidden_size": ABSENT,
            "parallel.tp": ABSENT,
            "train.steps": 400,
            "optimizer.lr": 1e-4,
            "train.precision": "fp16",
        },
        {"loss-scale"},
        {
            "script.variables": "no training command found",
            "tensor-model-parallel-size": "not set in the",
            "hidden-size": "not set in the",
        },
    ),
    "exported_command.slurm": Verdict(
        {
            "model.num_hidden_layers": 30,
            "parallel.tp": 4,
            "parallel.pp": 6,
            "parallel.dp": 6 * 8 // 24,
            "parallel.zero": 1,
        }
        | {
            "train.rampup_batch_size": [128, 128, 102400],
            "train.recompute": "full",
            "run.seed": 42,
            "train.stop_after": "1190m",
        }
        | {"model.position": ABSENT, "optimizer.warmup_steps": 100, "run.dir": ABSENT},
        {
            "pp-partition-method",
            "embed-layernorm",
            "pad-vocab-size-to",
            "position-embedding-type",
            "train-weighted-split-paths-path",
        },
        {"save": "$SCRATCH", "load": "$SCRATCH", "script.source": "was not found"},
    ),
    "deepspeed_llama.sh": Verdict(
        LLAMA
        | {
            "model.num_key_value_heads": 4,
            "model.intermediate_size": 2816,
            "parallel.zero": 1,
            "parallel.dp": 2,
            "train.steps": 2500,
        }
        | {
            "data.train": {"./base/news_text": 0.3, "./base/books_text": 0.7},
            "train.recompute": ABSENT,
            "data.validation": 0.05,
        },
        {"data-impl"},
        {"deepspeed-config": "megalite import-config"},
    ),
    "deepspeed_experts.sh": Verdict(
        GPT
        | {
            "model.num_experts": 64,
            "model.num_experts_per_tok": 1,
            "parallel.ep": 16,
            "parallel.dp": 16,
            "train.recompute": "full",
        }
        | {"train.steps": 5242880000 * 3 // 256 // 1024, "data.validation": 0.02, "run.dir": ABSENT},
        {"override-opt-param-scheduler", "lr-decay-tokens", "lr-warmup-tokens", "train-tokens", "data-impl"}
        | {"moe-loss-coeff", "moe-train-capacity-factor"},
        {"save": "output of a command", "data-path": "output of a command"},
    ),
    "sizes_by_argument.sh": Verdict(
        {"model.num_hidden_layers": ABSENT, "parallel.tp": ABSENT, "model.num_experts": ABSENT, "train.steps": ABSENT}
        | {"model.rope_theta": 1e6, "model.qk_norm": "head", "model.vocab_size": 32000, "model.head_dim": 128},
        {"max-padding-length"},
        {
            "num-layers": "set in the script to 16 or 24 or $NUM_LAYERS, under a condition",
            "tensor-model-parallel-size": "an argument of the script",
            "$do_option": "--use-distributed-optimizer or nothing",
        },
    ),
    "npu_latents.sh": Verdict(
        LLAMA
        | EXPERTS
        | {
            "parallel.tp": 2,
            "parallel.dp": 4,
            "parallel.ep": 4,
            "model.rope_scaling": ABSENT,
            "model.kv_lora_rank": 128,
        }
        | {"train.recompute": "full", "model.routed_scaling_factor": 2.5, "data.train": "your data path"},
        {
            "spec",
            "no-shared-storage",
            "context-parallel-algo",
            "use-fused-rotary-pos-emb",
            "use-fused-swiglu",
            "use-fused-rmsnorm",
        }
        | {
            "mla-fa-without-pad",
            "rope-scaling-original-max-position-embeddings",
            "rope-scaling-type",
            "first-k-dense-replace",
        }
        | {"n-shared-experts", "norm-topk-prob"},
    ),
    "model_arguments.sh": Verdict(
        LLAMA
        | {
            "model.num_hidden_layers": 16,
            "model.rope_theta": 1e6,
            "checkpoint.interval": 1000,
            "train.global_batch_size": ABSENT,
        },
        set(),
        {"script.variables": "no training command found"},
    ),
    "rl/model.sh": Verdict(
        LLAMA
        | {
            "parallel.tp": 1,
            "parallel.pp": 2,
            "train.precision": "bf16",
            "optimizer.betas": [0.9, 0.95],
            "train.recompute": "selective",
        }
        | {"train.micro_batch_size": 1, "train.global_batch_size": 64},
        {"grpo-group-size", "langrl-env-config", "pretrained-checkpoint"},
        {"script.variables": "no training command found"},
    ),
    "model_config.yaml": Verdict(
        {
            "model.hidden_act": "relu2",
            "model.gated_mlp": False,
            "model.norm_offset": 1.0,
            "model.partial_rotary_factor": 0.5,
        }
        | {
            "parallel.tp": 4,
            "parallel.zero": 1,
            "train.steps": 1000,
            "optimizer.warmup_steps": 10,
            "data.validation": 0.01,
        },
        {"decoupled-lr"},
        {"data-path": "not set in the"},
    ),
    "grid.sh": Verdict(
        GPT
        | {
            "optimizer.lr": 0.003,
            "model.initializer_range": 0.02,
            "parallel.dp": 8,
            "train.steps": 1000,
            "optimizer.min_lr": ABSENT,
        },
        set(),
        {"script.command": "several training commands", "min-lr": "output of a command"},
    ),
}
COMMANDS = {
    "MP_VP=2 bash sizes_by_argument.sh local A1B 1 64 1e-4 2048 2 2 true true sel /data/x_text 13107200 out": Verdict(
        LLAMA
        | {
            "model.num_hidden_layers": 24,
            "model.num_experts": 32,
            "model.num_key_value_heads": 4,
            "model.tie_word_embeddings": False,
        }
        | {
            "parallel.tp": 2,
            "parallel.pp": 2,
            "parallel.dp": 2,
            "parallel.virtual_stages": 6,
            "parallel.zero": 1,
            "train.steps": 100,
        }
        | {"parallel.sequence_parallel": True, "train.recompute": "selective", "data.train": "/data/x_text"},
        {"max-padding-length"},
    ),
    "bash sizes_by_argument.sh local 1B 2 64 3e-4 1024 1 1 false false none /data/x_text 6553600 out": Verdict(
        LLAMA
        | {
            "model.num_hidden_layers": 16,
            "model.num_experts": ABSENT,
            "model.num_key_value_heads": 8,
            "model.tie_word_embeddings": True,
        }
        | {
            "parallel.dp": 8,
            "parallel.schedule": ABSENT,
            "parallel.zero": 0,
            "train.recompute": ABSENT,
            "train.steps": 100,
        },
        {"max-padding-length"},
    ),
}
REJECTED = {
    "stages/job.sh": "uses ${MEGATRON_CODE_DIR}, ${MEGATRON_PARAMS}, which the script does not set",
    "stages/submit.sh": "uses ${MEGATRON_CODE_DIR}, ${MEGATRON_PARAMS}, which the script does not set",
    "nemo.yaml": "Configurations of NeMo are not supported",
    "neox.yml": "Configurations of GPT-NeoX are not supported",
    "other_trainer.sh": "Could not recognize the project",
}


def check(imported: Any, verdict: Verdict) -> None:
    options, lost, notes = imported
    assert {option: options.get(option, ABSENT) for option in verdict.options} == verdict.options
    assert set(lost) == verdict.lost
    reasons = {key: notes["open"].get(key, "") for key in verdict.open}
    assert all(verdict.open[key] in why for key, why in reasons.items()), reasons


@pytest.mark.parametrize("name", FILES)
def test_a_script_gives_what_it_says(name, capsys):
    ranks = FILES[name].ranks
    check(reported(capsys, FOLDER / name, *(("--dp", ranks) if ranks else ())), FILES[name])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_script_with_its_arguments(command, capsys, monkeypatch):
    monkeypatch.chdir(FOLDER)
    check(reported(capsys, command), COMMANDS[command])


@pytest.mark.parametrize("name", REJECTED)
def test_a_file_of_which_nothing_can_be_imported_is_rejected(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(FOLDER / name)])
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and REJECTED[name] in captured.err


def test_every_file_has_a_verdict_and_a_source():
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    read_by_others = {"stages/submit.sh", "rl/common.sh", "grid_job.slurm"}
    readme = (FOLDER.parent / "README.md").read_text()
    assert files == FILES.keys() | REJECTED.keys() | read_by_others
    assert all(f"`{name}`" in readme for name in files - read_by_others)
