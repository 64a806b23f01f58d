"""What an earlier preparation has left at PREFIX: the same one again has nothing to do, and another one must
not replace it unasked.

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

REPLACE = "or replace it with --overwrite, after which models that were trained with it no longer fit."


def summary_of(prefix: Path, key: str) -> dict[str, Any] | None:
    """The stored summary of a complete preparation of PREFIX with the same key, whose files and tokenizer are
    all as it left them; None if PREFIX is free.

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
        changed = "" if _tokenizer_is_unchanged(prefix) else ", which has changed since or is gone"
    except ConfigError:
        facts, changed = {}, ""
    held = f"({_described(prefix, facts)}{changed})"
    raise DataError(
        f"--output {prefix} holds data of other inputs, options or tokenizer {held}. Give another --output, "
        f"{REPLACE}"
    )


def check_new(tokenizer: Path) -> None:
    """Raise DataError if a tokenizer that is to be trained would replace a file."""
    if tokenizer.exists():
        written = f"made {_time(tokenizer)}"
        raise DataError(
            f"--train_tokenizer would replace {tokenizer} ({written}). Give another --tokenizer or --output, "
            f"{REPLACE}"
        )


TOP = ("vocab_size", "eos", "tokenizer", "documents", "tokens")
"""What of a summary PREFIX.json names at its top level."""


def entry(key: str, summary: dict[str, Any]) -> dict[str, Any]:
    """The entry `preparation` of PREFIX.json: the rest of the summary, the same wherever and in however many
    parts it was prepared."""
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
    """Documents, tokens, tokenizer, and when it was made."""
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
