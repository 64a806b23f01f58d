"""Metadata of the token files that a configuration names."""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.errors import ConfigError
from megalite.config.extensions import is_source, source_of
from megalite.config.rampup import samples_after
from megalite.config.streams import is_stream, names_in, streams_in
from megalite.stores.url import is_url, normal

if TYPE_CHECKING:
    from megalite.config.schema import Config
    from megalite.config.sections.data import DataConfig

REPEATS = 16
"""Epochs of pretraining after which further ones add next to nothing (Muennighoff et al. 2023,
Data-Constrained Language Models)."""
COMPARED = 1 << 16
"""Bytes of each part of a token file by which a copy of it is recognized: its beginning, its middle and its
end."""


def prefixes(source: Any) -> list[str]:
    """The token file prefixes in data.train or data.validation; empty for a held-out fraction, a stream, and
    a data source of the user."""
    if isinstance(source, str) and is_source(source):
        return []
    return [name for name in names_in(source) if not is_stream(name)]


def named_sets(source: Any) -> dict[str, str]:
    """The sets of data.validation, name → prefix; empty if they have no names."""
    return (
        source
        if isinstance(source, dict) and source and all(isinstance(each, str) for each in source.values())
        else {}
    )


def missing_files(source: Any) -> list[str]:
    """The files of data.train or data.validation that are not there, on this machine or in a store.

    Raises StoreError.
    """
    absent = []
    for prefix in prefixes(source):
        if is_url(prefix):
            from megalite.stores.token_files import missing

            absent += missing(prefix)
        else:
            names = (f"{prefix}{end}" for end in (".bin", ".idx"))
            absent += [name for name in names if not os.path.isfile(name)]
    return absent


def located(prefix: str | Path) -> str | Path:
    """The prefix of the .idx and .json of a token file on this machine: of local copies if it is in a store.
    Raises StoreError."""
    if not is_url(prefix):
        return prefix
    from megalite.stores.token_files import local_prefix

    return local_prefix(str(prefix))


def metadata(prefix: str | Path) -> dict[str, Any]:
    """PREFIX.json: `vocab_size`, `eos`, `tokenizer` and `tokenizer_fingerprint`, and `chat` for chat data;
    empty if the file is missing, as for Megatron-LM's files.

    Raises ConfigError if it is not a JSON object.
    """
    path = Path(f"{located(prefix)}.json")
    if not os.path.isfile(path):  # False also for a name that is too long
        return {}
    try:
        content, problem = json.loads(path.read_text(encoding="utf-8")), "it is something else"
    except (OSError, ValueError) as error:
        content, problem = None, str(error)
    if not isinstance(content, dict):
        way_out = 'Prepare the data again, or write {"vocab_size": V, "eos": ID} into it.'
        raise ConfigError(f"{path} is not a JSON object ({problem}). {way_out}")
    return content


def is_chat(prefix: str | Path) -> bool:
    """Whether the documents of a token file are conversations, with a loss mask in PREFIX.loss."""
    return "chat" in metadata(prefix)


def preference(prefix: str | Path) -> str | None:
    """The kind of preferences in a token file: `pairs`, of which documents 2i and 2i + 1 are the chosen and
    the rejected one, or `labelled`; None if it has none."""
    return metadata(prefix).get("preference")


def seen_in_training(data: "DataConfig") -> list[str]:
    """The files of data.validation that data.train has, too, under whatever path: prefixes, after the name of
    a set if there are sets.

    Files are the same if they are one file on the disk, if their paths lead to one place, or if one is a copy
    of the other.
    """
    trained = {identity for prefix in prefixes(data.train) for identity in _identities(prefix)}
    sets = named_sets(data.validation)
    said = {f"{name}: {prefix}": prefix for name, prefix in sets.items()} or {
        prefix: prefix for prefix in prefixes(data.validation)
    }
    return [text for text, prefix in said.items() if trained.intersection(_identities(prefix))]


def _identities(prefix: str) -> set[Any]:
    """The place of PREFIX.bin and, if it is there, device and inode, and a hash of its size and of parts of
    its tokens."""
    if is_url(prefix):
        return {normal(prefix)}
    path = os.path.realpath(f"{prefix}.bin")
    try:
        status = os.stat(path)
        with open(path, "rb") as file:
            content = hashlib.blake2b(str(status.st_size).encode())
            for start in (0, status.st_size // 2, max(status.st_size - COMPARED, 0)):
                file.seek(start)
                content.update(file.read(COMPARED))
    except (OSError, ValueError):
        return {path}
    return {path, (status.st_dev, status.st_ino), content.hexdigest()}


def remarks(config: "Config") -> list[str]:
    """Lines for the user about data that is rarely meant so: validation on training data, and what a run
    would leave unused."""
    shared = ", ".join(seen_in_training(config.data))
    seen = (
        [f"WARNING: data.validation has training data ({shared}): its validation loss is a training loss"]
        if shared
        else []
    )
    return seen + unused(config)


def unused(config: "Config") -> list[str]:
    """Lines for the user about what a run would leave unused, and rarely by intention: held-out data, and
    most of the vocabulary."""
    lines = []
    if config.data.validation is not None and config.validation.interval is None:
        lines.append(
            "data.validation holds out data, and no validation is run: set validation.interval to a number "
            "of steps"
        )
    known, size = data_vocab_size(config), config.model.vocab_size
    if known is not None and size is not None and 2 * known < size:
        way_out = (
            ""
            if config.model.from_hf or config.model.init_from
            else "; without model.vocab_size the model has those of the data"
        )
        lines.append(f"the data uses {known:,} of {size:,} ids (model.vocab_size){way_out}")
    return lines


def read_often(config: "Config") -> list[str]:
    """A line for each member of the data that a run that is planned would read many times."""
    # the user counts in epochs, or an epoch of a stream is not known
    if not prefixes(config.data.train) or streams_in(config.data.train) or config.train.epochs is not None:
        return []
    from megalite.config.samples import DataError, members, repeats  # numpy

    try:
        sources = members(config.data)
    except DataError:  # it is not there yet, or a rule says what is wrong
        return []
    train = config.train
    lines = repeats(sources, samples_after(train, train.steps), train.global_batch_size, REPEATS)
    return [f"train.steps = {train.steps:,}: {line}; give more data, or fewer steps" for line in lines]


def fit_vocabulary(config: "Config", fixed: bool) -> None:
    """Give the model the vocabulary of the training data if it has none, or if `model.resize_embeddings` lets
    it grow; adapters then train the embedding and the head, whose new rows would not be trained.

    Args:
        fixed: model.vocab_size is given, and stays.
    """
    model, lora, known = config.model, config.lora, data_vocab_size(config)
    if model.vocab_size is None:
        model.vocab_size = known
    if model.resize_embeddings is None:
        return
    if known is not None and not fixed:
        model.vocab_size = max(known, model.vocab_size or 0)
    if lora.rank and lora.modules_to_save is None:
        lora.modules_to_save = model.vocabulary_tables


def data_vocab_size(config: "Config") -> int | None:
    """The vocabulary size of the training data; None if no PREFIX.json has it."""
    if isinstance(config.data.train, str) and is_source(config.data.train):
        return source_of(config.data.train, config.data.sequence_length).vocab_size
    return max(
        (size for prefix in prefixes(config.data.train) if (size := metadata(prefix).get("vocab_size"))),
        default=None,
    )
