"""Companion files of the weights in a Hugging Face directory: config.json, tokenizer, generation settings.

An imported checkpoint has copies of them in COMPANIONS.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megalite.checkpoint import Manifest
from megalite.data.tokenizer.identity import (
    SETTINGS,
    TOKENIZER_JSON,
    TokenizerIdentity,
    copy_tokenizer,
    of_record,
    of_tokenizer,
)
from megalite.huggingface.files import ConversionError

COMPANIONS = "huggingface"
"""Directory of the companion files in an imported checkpoint."""
GENERATION = "generation_config.json"
PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Settings of the processor of a multimodal model."""


def copy_companions(directory: Path, target: Path) -> None:
    """Copy config.json, the tokenizer, and the generation and processor settings of a model."""
    copy_tokenizer(directory, target)
    for file in (directory / name for name in ("config.json", GENERATION, *PROCESSOR)):
        if file.is_file():
            shutil.copyfile(file, target / file.name)


def recorded_tokenizer(manifest: Manifest) -> TokenizerIdentity:
    """Return the tokenizer that is recorded in a checkpoint or stored in an imported one.

    If the recorded path no longer holds it, the name is the path of the run's copy.
    """
    if "tokenizer" in manifest.state:
        # imported here: a rank that starts from Hugging Face weights does not need it
        from megalite.data.tokenizer.run_copy import located

        return located(of_record(manifest.state["tokenizer"]), Path(manifest.directory))
    return of_tokenizer(Path(manifest.directory) / COMPANIONS)


def check_vocabulary(directory: Path, vocabulary: int) -> None:
    """Check that every id of the tokenizer in a model's directory is below the model's vocabulary size.

    Raises ConversionError.
    """
    has_tokenizer_json = (directory / TOKENIZER_JSON).is_file()  # the other files repeat parts of it
    readers = {TOKENIZER_JSON: _of_tokenizer} if has_tokenizer_json else _LARGEST
    for name, largest_id in readers.items():
        path = directory / name
        if not path.is_file():
            continue
        try:
            largest = largest_id(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(f"Could not load the tokenizer {path}: {error}") from None
        if largest >= vocabulary:
            raise ConversionError(
                f"{path} has token id {largest}, which is out of range for vocab_size={vocabulary}. Remove "
                "the additional tokens, or use the tokenizer of the model."
            )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _of_tokenizer(path: Path) -> int:
    """Return the largest id that the tokenizers library assigns.

    It numbers added tokens that are not pieces consecutively after the pieces, whatever ids the files give.
    """
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
