"""What identifies the weights of a model and its architecture, so that what one has computed is not taken for
another's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import find, manifest_of
from megalite.checkpoint.manifest import WEIGHT
from megalite.config.load import from_dict
from megalite.config.rule import show
from megalite.config.sections.model import ModelConfig
from megalite.families.model_config import hf_shape
from megalite.huggingface.config_json import TRAINING_ONLY, meaning
from megalite.huggingface.files import TensorFiles
from megalite.huggingface.source import HF

PIECES, PIECE = 4, 1 << 12
"""Of a tensor of a Hugging Face model, which has no checksums: number of pieces that are read, spread over
it, and their bytes."""

WITHOUT_EFFECT = (*TRAINING_ONLY, "router_bias_rate", "initializer_range", "max_position_embeddings")
"""Fields of a model that do not change what it computes for the tokens of a row."""


def weights_identity(name: str) -> str:
    """Return a hash of the weights of a checkpoint, a run directory (its newest checkpoint) or hf:DIR.

    A checkpoint's is that of the checksums in its manifest. Of a Hugging Face directory, pieces of each
    tensor are read. Names of directories and files, and which file has a tensor, do not matter.

    Raises:
        CheckpointError, ConfigError: there are no weights.
    """
    hasher = blake2b(digest_size=16)
    if name.startswith(HF):
        tensors = TensorFiles(Path(name.removeprefix(HF)))
        for tensor in sorted(tensors):
            hasher.update(json.dumps([tensor, tensors.shape(tensor)]).encode())
            _add(tensors.raw(tensor), hasher)
        return hasher.hexdigest()
    entries = manifest_of(find(Path(name))).tensors
    for tensor in sorted(each for each in entries if each.startswith(WEIGHT)):
        stored = asdict(entries[tensor])
        chunks = ((*each["offsets"], *each["sizes"], each["crc32c"]) for each in stored.pop("chunks"))
        hasher.update(json.dumps([tensor, stored, sorted(chunks)]).encode())
    return hasher.hexdigest()


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the options that determine what weights compute, if they are not the default, as JSON reads
    them. Those that have one derived from others have its value."""
    default, values = ModelConfig(), meaning(model)
    known = {
        name: value
        for name, value in values.items()
        if name not in WITHOUT_EFFECT and value != getattr(default, name)
    }
    content: dict[str, Any] = json.loads(json.dumps(known))
    return content


def architecture_of(name: str) -> dict[str, Any]:
    """Return the `architecture` of what `weights_identity` takes.

    Raises:
        CheckpointError, ConfigError: it cannot be read.
    """
    if name.startswith(HF):
        return architecture(ModelConfig(**hf_shape(name.removeprefix(HF))))
    return architecture(from_dict(manifest_of(find(Path(name))).state["config"]).model)


def changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Describe the difference of two architectures; empty if there is none, or if the first is not known."""
    if before is None:
        return ""
    default = ModelConfig()
    was, is_now = (
        {name: each.get(name, getattr(default, name)) for name in sorted({*before, *now})}
        for each in (before, now)
    )
    return ", ".join(
        f"model.{name} was {show(value)}, is {show(is_now[name])}"
        for name, value in was.items()
        if value != is_now[name]
    )


def other_weights(scored: str, model: str, named: str) -> str:
    """Say that what is stored of a model is not of the weights that a model has now.

    Args:
        scored: name of the former.
        model: name of the latter.
        named: what to call the latter.
    """
    if _place(scored) == _place(model):
        return f"{scored}, which has changed since it was scored: {named} has other weights now"
    return f"{scored}, whose weights differ from those of {named}"


def _place(name: str) -> Path:
    return Path(name.removeprefix(HF)).expanduser().resolve()


def _add(tensor: Tensor, hasher: blake2b) -> None:
    content = tensor.reshape(-1).view(torch.uint8)
    hasher.update(str(tensor.dtype).encode())
    for piece in range(PIECES):
        first = max(len(content) - PIECE, 0) * piece // (PIECES - 1)
        hasher.update(content[first : first + PIECE].numpy().tobytes())
