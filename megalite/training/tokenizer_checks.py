"""Checks that the data of a run has the tokenizer of the weights from which it starts.

The checks only read files, so that they do not need a process group.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, Manifest, find
from megalite.checkpoint.resized_embeddings import check_rows, rows_of
from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.schema import Config
from megalite.config.streams import streams_in
from megalite.data.tokenizer.comparison import Tokenized, compare, of_data, one_tokenizer
from megalite.data.tokenizer.identity import of_record, of_tokenizer
from megalite.families.model_config import hf_shape
from megalite.training.fault_injection import restarts

if TYPE_CHECKING:
    from collections.abc import Iterator

HF = "hf:"


def check_tokenizers(config: Config, fingerprint: str) -> list[str]:
    """Raise ConfigError if the data and the starting point of a run have different tokenizers.

    The training data, the validation data, and the checkpoint or weights are compared.

    Args:
        fingerprint: fingerprint of the training data, which identifies a checkpoint that was trained on the
            same data.

    Returns:
        lines for the user about accepted changes and unknown tokenizers.
    """
    notes = one_tokenizer(config.data)
    manifest = _resumed(config)
    if manifest is not None:
        return notes + check_resumed_tokenizer(config, fingerprint, manifest.state, manifest.directory)
    return (
        notes + [line for start in _starts(config) for line in _against_data(config, start)] + _rows(config)
    )


def check_stream_vocabulary(config: Config, tokens: int | None) -> None:
    """Raise ConfigError if the model has fewer ids than the tokenizer of its streams; rules check those of
    token files.

    Args:
        tokens: number of ids of the training data.
    """
    size = config.model.vocab_size
    if streams_in(config.data.train) and tokens is not None and size is not None and size < tokens:
        raise ConfigError(
            f"model.vocab_size = {size} is smaller than the vocabulary of data.tokenizer = "
            f"{config.data.tokenizer} ({tokens} tokens). Legal values: {tokens} and above. Nearest: {tokens}."
        )


def _rows(config: Config) -> list[str]:
    """Raise ConfigError if the starting weights have another vocabulary.

    `model.resize_embeddings` may allow the difference.
    """
    start = config.model.initial_weights
    if start is None:
        return []
    rows = None
    if start.startswith(HF):
        rows = hf_shape(start.removeprefix(HF)).get("vocab_size")
    else:
        with suppress(CheckpointError):  # damage is reported when it is loaded
            rows = rows_of(checkpoint.manifest_of(find(Path(start))))
    if rows is None:
        return []
    try:
        check_rows(config.model, rows, start)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    new, how = config.model.vocabulary - rows, config.model.resize_embeddings
    return (
        []
        if how is None
        else [f"model.resize_embeddings={how}: adding {new:,} tokens to the {rows:,} of {start}"]
    )


def check_resumed_tokenizer(
    config: Config, fingerprint: str, state: dict[str, Any], directory: Path
) -> list[str]:
    """Apply `check_tokenizers` to the checkpoint that the run continues.

    Equal fingerprints mean the same tokens.
    """
    if state.get("fingerprint") == fingerprint:
        return []
    from megalite.data.tokenizer.run_copy import located

    return _against_data(
        config,
        Tokenized(f"checkpoint.load = {directory}", located(of_record(state.get("tokenizer")), directory)),
    )


def _against_data(config: Config, start: Tokenized) -> list[str]:
    data = Tokenized(f"data.train = {show(config.data.train)}", of_data(config.data))
    from megalite.data.tokenizer.run_copy import is_there

    way_out = (
        "Use data prepared with "
        f"{start.tokenizer.name}{'' if is_there(start.tokenizer) else ', in its earlier version'}"
    )
    return compare(data, start, allow=config.data.allow_tokenizer_change, way_out=way_out, may_add=True)


def _resumed(config: Config) -> Manifest | None:
    """Return the manifest of the checkpoint that the run will resume, or None if none is readable."""
    load, own = config.checkpoint.load, config.run.directory / run_files.CHECKPOINTS
    place = checkpoint.latest(own) if load == "auto" or restarts() else None
    if place is None and load not in ("auto", "none"):
        place = find(Path(load))
    with suppress(CheckpointError):  # damage is reported when it is loaded
        return None if place is None else checkpoint.manifest_of(place)
    return None


def _starts(config: Config) -> Iterator[Tokenized]:
    """Yield the sources of the initial weights or of the model's shape, with their tokenizers."""
    start = config.model.init_from
    if start is None:
        shape = config.model.from_hf
        if shape is not None and (identity := of_tokenizer(shape)).can_be_known:
            yield Tokenized(f"model.from_hf = {shape}", identity)
    elif start.startswith(HF):
        yield Tokenized(f"model.init_from = {start}", of_tokenizer(start.removeprefix(HF)))
    else:
        with suppress(CheckpointError):
            from megalite.huggingface.companions import recorded_tokenizer

            yield Tokenized(
                f"model.init_from = {start}", recorded_tokenizer(checkpoint.manifest_of(find(Path(start))))
            )
    adapter = config.lora.init_from
    if adapter is not None and (identity := of_tokenizer(adapter)).can_be_known:
        yield Tokenized(f"lora.init_from = {adapter}", identity)
