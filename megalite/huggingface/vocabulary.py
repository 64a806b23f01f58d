"""Files next to the weights of a Hugging Face directory: tokenizer and generation settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megalite.data.tokenizer_identity import SETTINGS, TOKENIZER_JSON, copy_tokenizer
from megalite.huggingface.files import ConversionError

GENERATION = "generation_config.json"


def copy_companions(directory: Path, target: Path) -> None:
    """Copy the files of a model that do not depend on its weights: config.json, tokenizer and generation
    settings."""
    copy_tokenizer(directory, target)
    for file in (directory / "config.json", directory / GENERATION):
        if file.is_file():
            shutil.copyfile(file, target / file.name)


def check_vocabulary(directory: Path, vocabulary: int) -> None:
    """Raise ConversionError if the tokenizer in a model's directory has ids at or above the model's
    vocabulary size."""
    whole = (directory / TOKENIZER_JSON).is_file()  # of which the other files are parts
    for name, read in ({TOKENIZER_JSON: _of_tokenizer} if whole else _LARGEST).items():
        path = directory / name
        if not path.is_file():
            continue
        try:
            largest = read(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(f"{path} can not be read as a tokenizer: {error}") from None
        if largest >= vocabulary:
            raise ConversionError(
                f"{path} knows token {largest}, but vocab_size is {vocabulary}: the tokenizer is larger than "
                "the model's vocabulary. "
                "Remove those tokens, or give the tokenizer that belongs to the model."
            )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _of_tokenizer(path: Path) -> int:
    """The largest id that the tokenizers library gives: it numbers added tokens that are no pieces one after
    the other, after the pieces, whatever ids the files have for them."""
    content, settings = _json(path), path.with_name(SETTINGS)
    entries = content["model"].get("vocab", {})
    pieces = entries if isinstance(entries, dict) else {piece: i for i, (piece, *_) in enumerate(entries)}
    further = _json(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
    added = [*content.get("added_tokens", ()), *(further[i] for i in sorted(further, key=int))]
    new = {token["content"] for token in added} - pieces.keys()
    return max([*pieces.values(), len(pieces) + len(new) - 1])


def _of_settings(path: Path) -> int:
    return max(map(int, _json(path).get("added_tokens_decoder", {})), default=-1)


def _of_ids(path: Path) -> int:
    return max(_json(path).values(), default=-1)


_LARGEST = {SETTINGS: _of_settings, "added_tokens.json": _of_ids, "vocab.json": _of_ids}
