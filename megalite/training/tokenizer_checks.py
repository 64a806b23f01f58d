"""Whether the data of a run was made with the tokenizer of what it starts from. Reads files only, so that it
needs no process group."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, Manifest, find
from megalite.checkpoint.resized_embeddings import check_rows, rows_of
from megalite.config.errors import ConfigError
from megalite.config.rule import show
from megalite.config.schema import Config
from megalite.data.tokenizer.comparison import Tokenized, compare, of_data, one_tokenizer
from megalite.data.tokenizer.identity import of_record, of_tokenizer
from megalite.families.model_config import hf_shape
from megalite.training.fault_injection import restarts

if TYPE_CHECKING:
    from collections.abc import Iterator

HF = "hf:"


def check_tokenizers(config: Config, fingerprint: str) -> list[str]:
    """Raise ConfigError if data, validation data and what the run starts from, checkpoint or weights, were
    made with different tokenizers.

    Args:
        fingerprint: that of the training data, which tells whether a checkpoint was made with the same.

    Returns:
        lines for the user: changes that are accepted, and tokenizers that are not known.
    """
    notes = one_tokenizer(config.data)
    manifest = _resumed(config)
    if manifest is not None:
        return notes + check_resumed_tokenizer(config, fingerprint, manifest.state, manifest.directory)
    return (
        notes + [line for start in _starts(config) for line in _against_data(config, start)] + _rows(config)
    )


def _rows(config: Config) -> list[str]:
    """Raise ConfigError if the weights that a run starts from have another vocabulary, which
    `model.resize_embeddings` does not bridge."""
    start = config.model.initial_weights
    if start is None:
        return []
    rows = None
    if start.startswith(HF):
        rows = hf_shape(start.removeprefix(HF)).get("vocab_size")
    else:
        with suppress(CheckpointError):  # a damaged one is reported when it is loaded
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
        else [
            f"model.resize_embeddings = {how}: {start} has {rows:,} tokens, and the model gets {new:,} more"
        ]
    )


def check_resumed_tokenizer(
    config: Config, fingerprint: str, state: dict[str, Any], directory: Path
) -> list[str]:
    """`check_tokenizers` for a checkpoint that the run continues from; the same data is the same tokens."""
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
        "Give data prepared with "
        f"{start.tokenizer.name}{'' if is_there(start.tokenizer) else ' as it was then'}"
    )
    return compare(data, start, allow=config.data.allow_tokenizer_change, way_out=way_out, may_add=True)


def _resumed(config: Config) -> Manifest | None:
    """The manifest of the checkpoint that the run will resume; None if there is none, or none that can be
    read."""
    load, own = config.checkpoint.load, config.run.directory / "checkpoints"
    place = checkpoint.latest(own) if load == "auto" or restarts() else None
    if place is None and load not in ("auto", "none"):
        place = find(Path(load))
    with suppress(CheckpointError):  # a damaged one is reported when it is loaded
        return None if place is None else checkpoint.manifest_of(place)
    return None


def _starts(config: Config) -> Iterator[Tokenized]:
    """What gives the weights at step 0, or the shape of the model, and the tokenizer of each."""
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
