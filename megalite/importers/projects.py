"""The projects whose configurations are imported, and those that are recognized but not supported."""

from __future__ import annotations

from typing import Any, Protocol

from megalite.config.errors import ConfigError
from megalite.importers import (
    accelerate,
    axolotl,
    deepspeed,
    llama_factory,
    megatron,
    torchtitan,
    torchtune,
    trl,
)
from megalite.importers.preferences import GENERATES
from megalite.importers.verdict import ImportedFile, Table


class Project(Protocol):
    """The interface of a project's module.

    `defaults` returns the project's values of keys that the file does not have, where they differ from ours.
    """

    NAME: str

    def recognizes(self, leaves: dict[str, Any]) -> bool: ...
    def ranks(self, source: ImportedFile) -> int | None: ...
    def defaults(self, source: ImportedFile) -> dict[str, Any]: ...
    def table(self, source: ImportedFile) -> Table: ...


PROJECTS: dict[str, Project] = {
    "accelerate": accelerate,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "axolotl": axolotl,
    "llama-factory": llama_factory,
    "torchtune": torchtune,
    "deepspeed": deepspeed,
    **trl.PROJECTS,
}
"""The name on the command line → its module, in the order in which they are tried on a file."""
_TRAINER = "per_device_train_batch_size"
"""A key of transformers' TrainingArguments, which supported projects have as well."""
_GENERATION = ("num_generations", "reward_funcs", "num_ppo_epochs", "rloo_k", "missing_eos_penalty")
"""Keys of TRL's trainers that generate."""
_UNSUPPORTED: dict[str, list[set[str]]] = {
    "GPT-NeoX": [
        {"pipe-parallel-size"},
        {"pipe_parallel_size"},
        {"model-parallel-size", "num-layers"},
        {"model_parallel_size", "num_layers"},
    ],
    "NeMo": [
        {"trainer.devices", "model.micro_batch_size"},
        {"trainer.devices", "model.tensor_model_parallel_size"},
        {"trainer.devices", "trainer.num_nodes"},
    ],
    "Megatron-LM's --yaml-cfg": [{"language_model.num_layers", "model_parallel.tensor_model_parallel_size"}],
    "Megatron Bridge": [{"model.tensor_model_parallel_size", "train.global_batch_size"}],
    "nanotron": [{"parallelism.tp", "model.model_config.hidden_size"}],
    "OLMo": [{"model.d_model", "model.n_layers"}],
    "LLM Foundry": [
        {"model.d_model", "max_seq_len"},
        {"model.pretrained_model_name_or_path", "max_duration"},
    ],
}
"""A project → sets of keys, section.key: only its files have all keys of one of them."""


def recognize(leaves: dict[str, Any]) -> str:
    """Return the name, in PROJECTS, of the project whose configuration has these keys.

    Raises ConfigError if it is not supported, or not recognized.
    """
    supported = ", ".join(PROJECTS)
    for project, key_sets in _UNSUPPORTED.items():
        if any(keys <= leaves.keys() for keys in key_sets):
            raise ConfigError(
                f"Configurations of {project} are not supported. Supported projects: {supported}."
            )
    of_trainer = any(key.replace("-", "_") == _TRAINER for key in leaves)
    for name, module in PROJECTS.items():
        if module.recognizes(leaves) and not (of_trainer and module is deepspeed):  # which share keys
            return name
    if of_trainer:
        if any(key.replace("-", "_") in _GENERATION for key in leaves):
            raise ConfigError(f"Arguments of TRL: {GENERATES}.")
        raise ConfigError(
            "Arguments of transformers' Trainer or of TRL. For a file of `trl dpo --config FILE` and "
            f"others, pass the trainer before the file, one of: {', '.join(trl.PROJECTS)}. Otherwise set the "
            "options by hand; docs/coming-from.md (transformers Trainer) lists the corresponding options."
        )
    raise ConfigError(
        f"Could not recognize the project of the file. Pass the project before the file, one of: {supported}."
    )
