"""Which files of a Hugging Face directory hold its weights, in transformers' order of preference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""Ending of the index of a model in several files."""


MODEL = (SAFETENSORS, f"{SAFETENSORS}{INDEX}", PICKLED, f"{PICKLED}{INDEX}")
"""Files of a model, the preferred ones first: a file of all tensors goes before an index."""
ADAPTER_SETTINGS, ADAPTER = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter, of which PEFT knows no index."""


def weights_file(directory: Path, names: Sequence[str] = MODEL) -> Path | None:
    """The first of these files, or indices, that a directory has; None if it has none."""
    return next((directory / name for name in names if (directory / name).is_file()), None)


def unread_note(directory: Path) -> list[str]:
    """A line for the user about files of weights that are not read because another one is preferred; none if
    there are none."""
    read = weights_file(directory)
    others = [name for name in MODEL if (directory / name).is_file() and directory / name != read]
    return (
        [f"not read beside {read.name}, as in transformers: {', '.join(others)}"]
        if read is not None and others
        else []
    )
