"""What identifies the weights of a model, so that what one has computed is not taken for another's."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from megalite.checkpoint import find, manifest_of
from megalite.checkpoint.manifest import WEIGHT
from megalite.families.weight_files import MODEL
from megalite.huggingface.convert import HF
from megalite.huggingface.files import files_of

PIECES, PIECE = 64, 1 << 14
"""Of a Hugging Face file, which has no checksums: number of pieces that are read, spread over it, and their
bytes."""


def weights_identity(name: str) -> str:
    """Return a hash of the weights of a checkpoint, a run directory (its newest checkpoint) or hf:DIR.

    A checkpoint's is that of the checksums in its manifest. Of a Hugging Face directory, sizes and pieces of
    the files are read. The names of directories and files do not matter.

    Raises:
        CheckpointError, ConfigError: there are no weights.
    """
    hasher = blake2b(digest_size=16)
    if name.startswith(HF):
        directory = Path(name.removeprefix(HF))
        for file in sorted(files_of(directory, MODEL)):
            _add(directory / file, hasher)
        return hasher.hexdigest()
    tensors = manifest_of(find(Path(name))).tensors
    for tensor in sorted(each for each in tensors if each.startswith(WEIGHT)):
        stored = asdict(tensors[tensor])
        chunks = ((*each["offsets"], *each["sizes"], each["crc32c"]) for each in stored.pop("chunks"))
        hasher.update(json.dumps([tensor, stored, sorted(chunks)]).encode())
    return hasher.hexdigest()


def _add(path: Path, hasher: blake2b) -> None:
    size = path.stat().st_size
    hasher.update(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        for piece in range(PIECES):
            file.seek(max(size - PIECE, 0) * piece // (PIECES - 1))
            hasher.update(file.read(PIECE))
