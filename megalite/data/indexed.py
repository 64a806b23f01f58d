"""The indexed token file: Megatron-LM's PREFIX.bin and PREFIX.idx (MMIDIDX version 1), bit for bit, and PREFIX.json.

`PREFIX.bin` holds the tokens of all sequences, one after another. `PREFIX.idx` is little-endian:

    9 bytes   b"MMIDIDX\\x00\\x00"
    uint64    version, 1
    uint8     token type code (see DTYPES)
    uint64    number of sequences, n
    uint64    number of document marks, d
    int32[n]  tokens of each sequence
    int64[n]  byte at which each sequence starts in PREFIX.bin
    int64[d]  sequence at which each document starts; the last mark is n

`PREFIX.json` holds what the format cannot: vocabulary size, EOS token and tokenizer. For chat data it has a key `chat`, and the token file
PREFIX.loss holds, as uint8, a 1 for each token of PREFIX whose loss is counted, else a 0. The layout is that of Megatron-LM's
megatron/core/datasets/indexed_dataset.py. `megalite/data/preparation/writer.py` writes it.
"""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.checkout import command
from megalite.config.schema import ConfigError
from megalite.config.token_files import is_chat, metadata

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type code, sequences, document marks
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token type code → numpy type (the format's codes 6 and 7 are floats, which cannot be tokens)."""


class DataError(ConfigError):
    """Data that cannot be read or prepared; the message names the file, the reason and a way out."""


def companion(prefix: str | Path, ending: str) -> Path:
    """The file PREFIX.ending (a dot inside PREFIX is part of its name)."""
    return Path(f"{prefix}.{ending}")


class IndexedTokens:
    """A memory-mapped token file: opening costs the same for a megabyte and a terabyte.

    Attributes: `tokens` (all of them, flat), `sizes` (in tokens) and `pointers` (in bytes) of the sequences, `documents` (marks),
    `metadata` (PREFIX.json) and its `vocab_size` and `eos`, `loss` (PREFIX.loss for chat data, where each document is one sequence; else
    None). Raises DataError if the files are missing, damaged, empty or do not belong together, ConfigError if PREFIX.json is broken.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self._bin, self._idx = companion(prefix, "bin"), companion(prefix, "idx")
        dtype, self.sizes, self.pointers, self.documents = _read_index(self._idx)
        self._check_length(dtype.itemsize)
        self.tokens: NDArray[np.integer] = np.memmap(self._bin, dtype=dtype, mode="r")
        self.metadata = metadata(prefix)
        self.vocab_size: int | None = self.metadata.get("vocab_size")
        self.eos: int | None = self.metadata.get("eos")
        self.loss = IndexedTokens(f"{prefix}.loss") if is_chat(prefix) else None
        if self.loss is not None and not np.array_equal(self.loss.sizes, self.sizes):
            raise DataError(f"{prefix}.loss is not of the same documents as {prefix}. Prepare both again with {command('prepare')} --chat.")

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def document_at(self, token: int) -> int:
        """The first token of the first document that starts at `token` or later; the number of tokens if none does."""
        one_each = len(self.documents) == len(self.sizes) + 1  # one sequence per document: the pointers need no copy
        starts = self.pointers if one_each else self.pointers[self.documents[self.documents < len(self.sizes)]]
        found = int(np.searchsorted(starts, token * self.tokens.itemsize))
        return int(starts[found]) // self.tokens.itemsize if found < len(starts) else len(self)

    def digest_parts(self) -> list[bytes]:
        """What identifies the content without reading all of it: both files' sizes and 16 pieces of 64 KiB spread over each."""
        own = [part for path in (self._idx, self._bin) for part in _probe(path)]
        return own if self.loss is None else own + self.loss.digest_parts()

    def _check_length(self, itemsize: int) -> None:
        if not self._bin.is_file():
            raise DataError(f"{self._bin} is missing: a token file is a .bin and an .idx. Prepare it again with {command('prepare')}.")
        if len(self.sizes) == 0 or self.sizes[-1] + self.pointers[-1] == 0:
            raise DataError(f"{self._idx} holds no tokens. Prepare it again from a non-empty input.")
        expected = int(self.pointers[-1]) + int(self.sizes[-1]) * itemsize
        if (actual := self._bin.stat().st_size) != expected:
            raise DataError(f"{self._bin} has {actual} bytes, its .idx counts {expected}: truncated, or not its .bin. Prepare both again.")


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Token type, sizes [n], pointers [n] and document marks [d] of an .idx file."""
    if not path.is_file():
        raise DataError(f"{path} is missing: a token file is a .bin and an .idx. Make it with {command('prepare')} --output PREFIX.")
    length = path.stat().st_size
    if length < HEADER.size:
        raise DataError(f"{path} has {length} bytes, fewer than its header: it is truncated. Prepare it again.")
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, sequences, marks = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(f"{path} does not start with MMIDIDX: it is not a token file index. Give a PREFIX that {command('prepare')} wrote.")
    if version != 1 or code not in DTYPES:
        raise DataError(
            f"{path} has version {version} and token type {code}; version 1 with types {sorted(DTYPES)} can be read. Prepare it again."
        )
    if length != (expected := HEADER.size + 12 * sequences + 8 * marks):
        raise DataError(f"{path} has {length} bytes where its header counts {expected}: it is truncated or damaged. Prepare it again.")
    sizes = np.frombuffer(raw, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", marks, HEADER.size + 12 * sequences)
    return np.dtype(DTYPES[code]), sizes, pointers, documents


def _probe(path: Path, pieces: int = 16, piece: int = 1 << 16) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= pieces * piece:
            return [str(size).encode(), file.read()]
        parts = [str(size).encode()]
        for i in range(pieces):
            file.seek((size - piece) * i // (pieces - 1))
            parts.append(file.read(piece))
        return parts
