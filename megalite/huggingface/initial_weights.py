"""Start of a run from a Hugging Face directory: each rank copies its parts out of the memory-mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from megalite.checkpoint.errors import LISTED
from megalite.checkpoint.manifest import WEIGHT
from megalite.checkpoint.resized_embeddings import Read, check_rows, resized
from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.sections.model import ModelConfig
from megalite.families.weight_files import ADAPTER_SETTINGS
from megalite.huggingface.config_json import meaning
from megalite.huggingface.files import ConversionError
from megalite.huggingface.router_bias import PREFIX, fill
from megalite.huggingface.source import HF, HuggingFaceSource
from megalite.parallel.spec import Rectangle

FREE_TO_CHANGE = (
    *(
        "max_position_embeddings",
        "rope_theta",
        "rope_local_theta",
        "rope_scaling",
        "sliding_window",
        "sliding_window_layers",
    ),
    *("initializer_range", "embedding_dropout", "attention_dropout", "residual_dropout"),
    *("router_balance", "router_aux_loss_coef", "router_z_loss_coef", "expert_capacity_factor"),
)
"""Fields in which a run may differ from its initial model, to extend the context or to train with dropout."""


def starting_weights(model: ModelConfig, seed: int = 0, beside_adapter: bool = False) -> Read | None:
    """Return a function that fills a rank's rectangles from model.init_from = hf:DIR, or None without it.

    Only the required bytes are read. The directory is opened and checked at the first call.

    Args:
        seed: of new rows that `model.resize_embeddings: init` draws.
        beside_adapter: the directory may hold an adapter, too, since the run reads one.
    """
    name = model.initial_weights or ""
    if not name.startswith(HF):
        return None
    opened = cache(partial(_reader, model, seed, Path(name.removeprefix(HF)), beside_adapter))
    return lambda rectangles: opened()(rectangles)


def check_no_adapter(directory: Path) -> None:
    """Raise ConversionError if transformers would apply an adapter to the weights of a directory."""
    if (directory / ADAPTER_SETTINGS).is_file():
        raise ConversionError(
            f"{directory} contains an adapter ({ADAPTER_SETTINGS}) next to the weights, and transformers "
            "would apply it. Move the adapter to a separate directory. To start the run from the adapter, "
            "set lora.init_from to this directory."
        )


def _own_shape(model: ModelConfig, directory: Path, different: Sequence[str]) -> str:
    """Return the way to use the architecture of the model in a directory."""
    shape = model.from_hf
    if shape is None or Path(shape).resolve() != directory.resolve():
        return f"Set model.from_hf={directory}."
    return f"Remove {', '.join(f'model.{name}' for name in different)} to use the values of model.from_hf."


def _fitting(source: ModelConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the meaning of a source's model as far as a run's model must have the same.

    The vocabulary may be larger, and the head of a reward model replaces that of a language model.
    """
    changed: dict[str, Any] = {"vocab_size": model.vocab_size}
    if model.output_head == "reward":
        changed |= {"output_head": "reward", "tie_word_embeddings": model.tie_word_embeddings}
    return meaning(source) | changed


def _reader(model: ModelConfig, seed: int, directory: Path, beside_adapter: bool) -> Read:
    """Return a function that fills a rank's rectangles.

    Raises ConversionError if the directory's model is not the run's, or cannot be read.
    """
    if not beside_adapter:
        check_no_adapter(directory)
    try:
        source = HuggingFaceSource.of(directory)
    except ConfigError as error:
        raise ConversionError(f"model.init_from={HF}{directory}: {error}") from None
    ours, theirs = meaning(model), _fitting(source.model, model)
    check_rows(model, source.model.vocabulary, f"{HF}{directory}")
    different = [name for name in ours if ours[name] != theirs[name] and name not in FREE_TO_CHANGE]
    if ours["mtp_layers"] < theirs["mtp_layers"]:  # some are left out
        different.remove("mtp_layers")
    if different == ["mtp_layers"]:
        has = (
            f"has weights for {theirs['mtp_layers'] or 'no'} modules. Set "
            f"model.mtp_layers={theirs['mtp_layers']}"
        )
        raise ConversionError(
            f"model.mtp_layers={ours['mtp_layers']}, but model.init_from={HF}{directory} {has}."
        )
    if different:
        listed = ", ".join(
            f"model.{name} is {show(ours[name])}, but {show(theirs[name])} in the directory"
            for name in different[:LISTED]
        )
        raise ConversionError(
            f"model.init_from={HF}{directory} does not match the model of this run: {listed}. "
            f"{_own_shape(model, directory, different)}"
        )

    def read(rectangles: Sequence[Rectangle]) -> None:
        for part in rectangles:
            if part.name.startswith(PREFIX):
                fill(part.tensor, source.states.get(part.name), part.offsets)
            else:
                part.tensor.copy_(
                    source.read(part.name.removeprefix(WEIGHT), part.offsets, part.tensor.shape)
                )

    fill_all = resized(model, seed, source.model.vocabulary, read)

    def read_finite(rectangles: Sequence[Rectangle]) -> None:
        fill_all(rectangles)
        source.check_finite()

    return read_finite
