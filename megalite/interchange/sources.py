"""The other programs whose checkpoints are read, by the prefix of a name."""

from __future__ import annotations

import os
from pathlib import Path

from megalite.config.schema import Config
from megalite.interchange.import_state import Source


def open_source(
    name: str,
    given: Config | None = None,
    *,
    weights_only: bool = False,
    drop_mtp: bool = False,
    drop_padding: bool = False,
) -> Source:
    """Return the source of megatron:DIR, torchtitan:DIR or dcp:DIR, without reading weights.

    Args:
        given: the model, if the checkpoint does not describe it.
        weights_only: leave out the state of the optimizer.
        drop_mtp: leave out multi-token prediction modules.
        drop_padding: leave out the rows of padding of the vocabulary.

    Raises:
        ConfigError, CheckpointError: it cannot be read, or has something that is not supported.
    """
    prefix, _, path = name.partition(":")
    directory = Path(os.path.expanduser(path))
    options = {"weights_only": weights_only, "drop_mtp": drop_mtp, "drop_padding": drop_padding}
    if prefix == "megatron":
        from megalite.interchange.megatron_import import megatron_source

        return megatron_source(directory, given, **options)
    from megalite.interchange.torchtitan import torchtitan_source

    return torchtitan_source(directory, given, **options)
