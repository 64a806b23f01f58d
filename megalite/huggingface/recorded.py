"""Which tokenizer a checkpoint was made with."""

from __future__ import annotations

from pathlib import Path

from megalite.checkpoint import Manifest
from megalite.data.tokenizer_identity import TokenizerIdentity, of_record, of_tokenizer

COMPANIONS = "huggingface"
"""Directory in an imported checkpoint: config.json, tokenizer and generation settings."""


def tokenizer_of(manifest: Manifest) -> TokenizerIdentity:
    """The tokenizer recorded in a checkpoint, or stored in an imported one; nothing is known of other
    checkpoints.

    Its name is that of the run's copy where its own place does not hold it any more.
    """
    if "tokenizer" in manifest.state:
        # a rank that starts from Hugging Face weights does not need it
        from megalite.data.tokenizer_copy import located

        return located(of_record(manifest.state["tokenizer"]), Path(manifest.directory))
    return of_tokenizer(Path(manifest.directory) / COMPANIONS)
