"""Projects whose configurations are recognized, so that their name can be given, and not imported."""

from __future__ import annotations

from typing import Any

TRAINER = "per_device_train_batch_size"
"""A key of transformers' TrainingArguments, which projects of their own have, too."""
SIGNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "GPT-NeoX": (
        *(("pipe-parallel-size",), ("pipe_parallel_size",)),
        *(("model-parallel-size", "num-layers"), ("model_parallel_size", "num_layers")),
    ),
    "NeMo": (
        *(
            ("trainer.devices", "model.micro_batch_size"),
            ("trainer.devices", "model.tensor_model_parallel_size"),
        ),
        ("trainer.devices", "trainer.num_nodes"),
    ),
    "Megatron-LM's --yaml-cfg": (("language_model.num_layers", "model_parallel.tensor_model_parallel_size"),),
    "Megatron Bridge": (("model.tensor_model_parallel_size", "train.global_batch_size"),),
    "nanotron": (("parallelism.tp", "model.model_config.hidden_size"),),
    "OLMo": (("model.d_model", "model.n_layers"),),
    "LLM Foundry": (
        ("model.d_model", "max_seq_len"),
        ("model.pretrained_model_name_or_path", "max_duration"),
    ),
}
"""A project → alternatives of keys, section.key, that only its files have together."""


def project(leaves: dict[str, Any]) -> str | None:
    """The project whose configuration this is; None if it is none of these."""
    return next(
        (name for name, signs in SIGNS.items() if any(leaves.keys() >= {*keys} for keys in signs)), None
    )
