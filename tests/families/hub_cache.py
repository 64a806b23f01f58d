"""A cache in the layout of huggingface_hub's, and models to put into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from megalite.families import hub

LLAMA: dict[str, Any] = {
    **{
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    **{
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
}
SHAPE = {"config.json": json.dumps(LLAMA)}
TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": "{}"}
SHARD = "model-00001-of-00001.safetensors"
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": {"model.embed_tokens.weight": SHARD}})}


def store(cache: Path, name: str, files: dict[str, str], revision: str = "a" * 40) -> Path:
    """Put a repository into the cache: files are links to blobs, and refs/main names the snapshot."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / revision
    for directory in (root / "blobs", root / "refs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(revision)
    for file, content in files.items():
        blob = root / "blobs" / f"{revision[:8]}-{file}"
        blob.write_text(content)
        if not (snapshot / file).exists():
            (snapshot / file).symlink_to(blob)
    return snapshot


@contextmanager
def hub_cache(directory: Path, *, online: bool = False) -> Iterator[Path]:
    """An empty cache, in an empty working directory; the Hub answers or does not."""
    cache, working = directory / "hub", directory / "working"
    cache.mkdir()
    working.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(hub, "online", lambda: online)
        patch.chdir(working)
        yield cache
