"""A run's own copy of the tokenizer of its data, RUN/tokenizer/: its model can be used when the tokenizer's
place is gone or has changed.

The copy is found by the digest of its files, so that it is exactly what the checkpoint records. A run whose
tokenizer was changed (data.allow_tokenizer_change) has the second one in RUN/tokenizer-2/. Bytes need no
copy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.config.sections.data import DataConfig
from megalite.data.tokenizer.comparison import of_data
from megalite.data.tokenizer.identity import TokenizerIdentity, copy_tokenizer, digest_of, tokenizer_files

NAME = "tokenizer"


def keep(data: DataConfig, run: Path) -> None:
    """Store the tokenizer of the training data in a run's directory, unless it is there or is not what made
    the data. Never fails."""
    with suppress(OSError, ConfigError):
        identity = of_data(data)
        if (
            identity.name is None
            or identity.name == "byte"
            or not is_there(identity)
            or _copy(identity, run) is not None
        ):
            return
        place = Path(identity.name)
        temporary = run / f".{NAME}.{os.getpid()}"
        try:
            temporary.mkdir()
            copy_tokenizer(place, temporary)
            if (place / "config.json").is_file():  # AutoTokenizer reads it
                shutil.copyfile(place / "config.json", temporary / "config.json")
            temporary.rename(_free(run))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def located(recorded: TokenizerIdentity, checkpoint: Path) -> TokenizerIdentity:
    """The tokenizer that a checkpoint records, under the name of its run's copy where its own place does not
    hold it any more."""
    if recorded.name is None or is_there(recorded):
        return recorded
    place = _copy(recorded, checkpoint.resolve().parent.parent)
    return recorded if place is None else replace(recorded, name=str(place))


def is_there(recorded: TokenizerIdentity) -> bool:
    """Whether the place of a recorded tokenizer still holds it."""
    return recorded.name == "byte" or (recorded.name is not None and _is_at(recorded, Path(recorded.name)))


def _copy(recorded: TokenizerIdentity, run: Path) -> Path | None:
    places = (place for directory in sorted(run.glob(f"{NAME}*")) for place in _places(directory))
    return next((place for place in places if _is_at(recorded, place)), None)


def _places(directory: Path) -> Iterator[Path]:
    """A copy: a directory of Hugging Face's form, or the sentencepiece model in it."""
    yield directory
    yield from (file for file in directory.glob("*") if file.is_file())


def _is_at(recorded: TokenizerIdentity, place: Path) -> bool:
    """Whether a place holds the files with the recorded digest."""
    with suppress(OSError, ConfigError):
        files = tokenizer_files(place)
        return bool(files) and recorded.digest is not None and digest_of(place, files) == recorded.digest
    return False


def _free(run: Path) -> Path:
    names = (run / (NAME if number == 1 else f"{NAME}-{number}") for number in count(1))
    return next(place for place in names if not place.exists())
