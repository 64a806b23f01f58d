"""Detection of an earlier preparation of PREFIX, which is neither repeated nor replaced without --overwrite.

Models that were trained on PREFIX need its tokens and its tokenizer as they are.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.samples import TokenIndex
from megalite.config.token_files import metadata
from megalite.data.indexed import DataError, companion
from megalite.data.tokenizer.identity import digest_of, of_token_file, tokenizer_files
from megalite.system.messages import counted

REPLACE = "or pass --overwrite to replace it. Models trained with the old files then no longer match it."


def summary_of(prefix: Path, key: str) -> dict[str, Any] | None:
    """Return the summary of a complete preparation of PREFIX with the same key, or None if PREFIX is free.

    Its files and its tokenizer must be unchanged.

    Raises:
        DataError: PREFIX holds something else.
    """
    if not companion(prefix, "idx").is_file():  # the last file that is written
        return None
    try:
        facts = metadata(prefix)
        stored = facts.get("preparation", {})
        if (
            stored.get("key") == key
            and companion(prefix, "bin").is_file()
            and _tokenizer_is_unchanged(prefix)
        ):
            summary = {name: facts[name] for name in TOP} | stored | {"existing": True}
            del summary["key"]
            return summary
        changed = "" if _tokenizer_is_unchanged(prefix) else ", which has since been changed or removed"
    except ConfigError:
        facts, changed = {}, ""
    held = f"({_described(prefix, facts)}{changed})"
    raise DataError(
        f"--output {prefix} already contains data prepared from other inputs or with other options {held}. "
        f"Choose another --output, {REPLACE}"
    )


def check_new(tokenizer: Path) -> None:
    """Raise DataError if training a tokenizer would overwrite a file."""
    if tokenizer.exists():
        written = f"made {_time(tokenizer)}"
        raise DataError(
            f"--train_tokenizer would overwrite {tokenizer} ({written}). Choose another --tokenizer or "
            f"--output, {REPLACE}"
        )


TOP = ("vocab_size", "eos", "tokenizer", "documents", "tokens")
"""Keys of a summary at the top level of PREFIX.json."""


def entry(key: str, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the entry `preparation` of PREFIX.json with the rest of the summary.

    It does not depend on the location or on the number of interruptions.
    """
    return {"key": key} | {
        name: value
        for name, value in summary.items()
        if name not in (*TOP, "prefix", "resumed_bytes", "existing")
    }


def _tokenizer_is_unchanged(prefix: Path) -> bool:
    identity = of_token_file(prefix)
    if identity.name is None or identity.digest is None:
        return True  # not known
    return digest_of(identity.name, tokenizer_files(identity.name)) == identity.digest


def _described(prefix: Path, facts: dict[str, Any]) -> str:
    """Describe a token file by its documents, tokens, tokenizer and time."""
    try:
        index = TokenIndex(prefix)
        size = f"{counted(len(index.sizes), 'document')}, {len(index):,} tokens, "
    except DataError:
        size = ""
    return (
        f"{size}made {_time(companion(prefix, 'idx'))} with the tokenizer "
        f"{facts.get('tokenizer', 'of another program')}"
    )


def _time(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
