"""The runs as data: model and options of each. Together they cover the shapes, layouts, precisions and passes that
change sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STEPS, SAVED = 6, 3
"""Steps of every run, and the step after which those that are resumed have saved."""

Options = dict[str, dict[str, Any]]

COMMON: Options = {
    "data": {"train": "text", "sequence_length": 32},
    "train": {"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 2, "grad_clip": 1.0},
    "optimizer": {"lr": 3e-3, "warmup_steps": 2},
    "checkpoint": {"load": "none"},
}
LLAMA: dict[str, Any] = {
    **{
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{"max_position_embeddings": 64, "rope_theta": 500000.0},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    },
}
GPT_2: dict[str, Any] = {
    **{
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    **{
        "position": "learned",
        "norm": "layer",
        "gated_mlp": False,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
    },
    **{"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
}
QWEN_3: dict[str, Any] = {
    **{
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{"head_dim": 16, "qk_norm": "head", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "residual_dropout": 0.1}
DOCUMENTS = {"reset_positions": True, "eod_mask_loss": True}


@dataclass(frozen=True)
class Run:
    """A run of pretrain.py: its model, and what its options change about `COMMON`. `resumed`: it saves in the middle,
    too."""

    name: str
    model: dict[str, Any]
    options: Options = field(default_factory=dict)
    resumed: bool = False

    @property
    def ranks(self) -> int:
        parallel = self.options.get("parallel", {})
        return int(parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("dp", 1))

    def config(self) -> Options:
        """The configuration file, its paths relative to the directory of the recording."""
        sections: Options = {"run": {"name": self.name, "dir": "runs"}, "model": self.model, **COMMON}
        for section, values in self.options.items():
            sections[section] = {**sections.get(section, {}), **values}
        if self.resumed:
            sections["checkpoint"] = {**sections["checkpoint"], "interval": SAVED}
        return sections


def fp16(power: int) -> Options:
    """A loss scale that overflows at first, where `power` is large, and is doubled later."""
    return {
        "train": {"precision": "fp16"},
        "fp16": {"initial_scale_power": power, "loss_scale_window": 2, "hysteresis": 1},
    }


RUNS: tuple[Run, ...] = (
    Run("llama", LLAMA, {"data": DOCUMENTS, "train": {"grad_clip": 0.3}}, resumed=True),
    Run(
        "gpt-2 dropout recompute",
        {**GPT_2, **DROPOUT},
        {"train": {"recompute": "selective"}, "data": {"validation": 0.1}, "validation": {"interval": 3, "batches": 2}},
    ),
    Run(
        "gpt-2 fp64 every-2",
        {**GPT_2, **DROPOUT},
        {"train": {"precision": "fp64", "recompute": "every-2"}, "data": {"validation": 0.1}},
    ),
    Run("qwen3 bf16", QWEN_3, {"train": {"precision": "bf16", "grad_dtype": "bf16"}}),
    Run("fp16", {**LLAMA, "tie_word_embeddings": True}, fp16(20), resumed=True),
    Run(
        "chunks, softcaps, window",
        {
            **LLAMA,
            "sliding_window": 8,
            "sliding_window_layers": [0, 2],
            "attention_softcap": 5.0,
            "logit_softcap": 3.0,
            "norm_offset": 1.0,
        },
        {
            "train": {"loss_chunk": 16, "z_loss": 1e-3, "label_smoothing": 0.1, "grad_clip": 0.0},
            "optimizer": {"decay": "wsd", "wsd_decay_fraction": 0.5, "min_lr": 1e-4},
            "data": {"train": {"text": 0.7, "more": 0.3}},
        },
    ),
    Run("lora", LLAMA, {"lora": {"rank": 4, "dropout": 0.1}}, resumed=True),
    Run("chat", LLAMA, {"data": {"train": "chat", "packing": True, "sequence_length": 64}}),
    Run(
        "tp2 sequence parallel", LLAMA, {"parallel": {"tp": 2, "sequence_parallel": True}, "train": {"grad_clip": 0.3}}
    ),
    Run(
        "tp2 gpt-2 bf16 dropout",
        {**GPT_2, **DROPOUT},
        {"parallel": {"tp": 2}, "train": {"precision": "bf16", "recompute": "full"}},
    ),
    Run("pp2 1f1b qwen3", QWEN_3, {"parallel": {"pp": 2}, "data": DOCUMENTS}),
    Run(
        "pp4 zb-v",
        {**LLAMA, "num_hidden_layers": 8},
        {"parallel": {"pp": 4, "schedule": "zb-v"}, "train": {"micro_batch_size": 1, "grad_clip": 1.65}},
    ),
    Run(
        "pp2 zb-h2 gpt-2",
        GPT_2,
        {"parallel": {"pp": 2, "schedule": "zb-h2", "optimistic_step": False}, "train": {"grad_clip": 0.3}},
    ),
    Run("pp2 interleaved dp2 zero3", LLAMA, {"parallel": {"pp": 2, "dp": 2, "schedule": "interleaved", "zero": 3}}),
    Run(
        "dp2 zero1",
        LLAMA,
        {"parallel": {"dp": 2, "zero": 1, "bucket_mb": 0.02, "reduce_dtype": "bf16"}, "train": {"precision": "bf16"}},
    ),
    Run("dp2 zero2 qwen3", QWEN_3, {"parallel": {"dp": 2, "zero": 2, "bucket_mb": 0.02}, "train": {"grad_clip": 0.3}}),
    Run(
        "dp2 zero3",
        {**LLAMA, **DROPOUT},
        {"parallel": {"dp": 2, "zero": 3}, "train": {"recompute": "full"}},
        resumed=True,
    ),
    Run("dp2 powersgd", LLAMA, {"parallel": {"dp": 2, "zero": 1, "powersgd_rank": 2, "bucket_mb": 0.02}}, resumed=True),
    Run(
        "dp2 offload disk",
        {**LLAMA, "tie_word_embeddings": True},
        {"parallel": {"dp": 2, "offload": "disk"}, **fp16(8)},
    ),
    Run("dp2 chat", QWEN_3, {"parallel": {"dp": 2}, "data": {"train": "chat", "packing": True, "sequence_length": 64}}),
    Run(
        "tp2 lora bf16",
        QWEN_3,
        {"parallel": {"tp": 2}, "lora": {"rank": 4, "dropout": 0.1}, "train": {"precision": "bf16"}},
    ),
    Run(
        "gemma tp4",
        {
            **LLAMA,
            **{
                "norm_placement": "both",
                "norm_offset": 1.0,
                "embedding_scale": 32**0.5,
                "attention_scale": 0.3,
                "qk_norm": "full",
            },
            **{"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "no_rope_layers": [3]},
        },
        {"parallel": {"tp": 4}},
    ),
    Run(
        "pp2 v-half offload cpu",
        {**LLAMA, "num_hidden_layers": 5},
        {"parallel": {"pp": 2, "schedule": "v-half", "offload": "cpu"}},
    ),
    Run(
        "pp2 zb-h1 fp16",
        {**LLAMA, "tie_word_embeddings": True},
        {"parallel": {"pp": 2, "schedule": "zb-h1"}, **fp16(20)},
    ),
    Run(
        "pp2 gpipe async",
        GPT_2,
        {"parallel": {"pp": 2, "schedule": "gpipe"}, "checkpoint": {"load": "none", "async_save": True}},
    ),
    Run(
        "dp4 zero3 groups of 2",
        LLAMA,
        {"parallel": {"dp": 4, "zero": 3, "dp_shard": 2, "zero3_reshard": "step", "bucket_mb": 0.02}},
    ),
    Run(
        "dp2 zero3 offloaded parameters",
        QWEN_3,
        {
            "parallel": {"dp": 2, "zero": 3, "offload": "cpu", "offload_parameters": True},
            "train": {"precision": "bf16"},
        },
    ),
    Run(
        "tp2 dp2 zero0 deterministic",
        {**GPT_2, **DROPOUT},
        {"parallel": {"tp": 2, "dp": 2, "zero": 0, "sequence_parallel": True}, "run": {"deterministic": True}},
    ),
    Run(
        "tp2 pp2 dp2",
        {**LLAMA, **DROPOUT, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"parallel": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True, "bucket_mb": 0.02}, "data": DOCUMENTS},
        resumed=True,
    ),
)
