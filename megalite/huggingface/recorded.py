"""Which tokenizer a checkpoint was made with. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint import Manifest
from megalite.data.tokenizer_identity import TokenizerIdentity, of_record, of_tokenizer

COMPANIONS = "huggingface"
"""Directory in an imported checkpoint: config.json, tokenizer and generation settings."""


def tokenizer_of(manifest: Manifest) -> TokenizerIdentity:
    """The tokenizer recorded in a checkpoint, or stored in an imported one; nothing is known of other checkpoints."""
    if "tokenizer" in manifest.state:
        return of_record(manifest.state["tokenizer"])
    return of_tokenizer(Path(manifest.directory) / COMPANIONS)
