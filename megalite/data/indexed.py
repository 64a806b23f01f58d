"""Reader of Megatron-LM's indexed token files (MMIDIDX version 1).

A token file consists of PREFIX.bin, PREFIX.idx and PREFIX.json.

`PREFIX.bin` holds the tokens of all sequences, one after another. `PREFIX.idx` is little-endian:

    9 bytes   b"MMIDIDX\\x00\\x00"
    uint64    version, 1
    uint8     token type code (DTYPES in megalite/config/samples.py)
    uint64    number of sequences, n
    uint64    number of document marks, d
    int32[n]  tokens of each sequence
    int64[n]  byte at which each sequence starts in PREFIX.bin
    int64[d]  sequence at which each document starts; the last mark is n

`PREFIX.json` holds what the format cannot: vocabulary size, EOS token and tokenizer. The layout is that of
Megatron-LM's megatron/core/datasets/indexed_dataset.py.

For chat data PREFIX.json has a key `chat`, and the token file PREFIX.loss holds, as uint8, a 1 for each token
of PREFIX whose loss is counted, else a 0; or, if messages have weights other than 0 and 1, the weight of each
token as float32 (type code 7).

For preferences it also has a key `preference`, pairs or labelled. PREFIX.loss then holds CHOSEN for tokens of
a chosen or good completion, REJECTED for tokens of a rejected or bad one, and 0 for tokens of the prompt.
Documents 2i and 2i + 1 of pairs are the chosen and the rejected one.

`megalite/data/preparation/writer.py` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megalite.config.samples import DTYPES, TokenIndex
from megalite.config.samples import DataError as DataError
from megalite.config.token_files import is_chat, located, metadata
from megalite.stores.url import is_url

if TYPE_CHECKING:
    from megalite.stores.token_files import CachedObject

CHOSEN, REJECTED = 1, 2
LOSS_DTYPES = {1: DTYPES[1], 7: "<f4"}
"""Type codes of PREFIX.loss → numpy type."""


def companion(prefix: str | Path, ending: str) -> Path:
    """Return the path PREFIX.ending. PREFIX may contain dots."""
    return Path(f"{prefix}.{ending}")


class IndexedTokens(TokenIndex):
    """A memory-mapped token file: opening costs the same for a megabyte and a terabyte.

    Attributes:
        tokens: all of them, flat.
        metadata: PREFIX.json.
        vocab_size, eos, preference: those of PREFIX.json.
        loss: PREFIX.loss for chat data, where each document is one sequence; else None.

    Raises:
        DataError: the files are missing, damaged, empty or do not belong together.
        ConfigError: PREFIX.json is broken.
    """

    def __init__(self, prefix: str | Path, dtypes: Mapping[int, str] = DTYPES):
        super().__init__(prefix, dtypes)
        self._idx = companion(located(prefix), "idx")
        self._bin: Path | CachedObject = companion(prefix, "bin")
        self.tokens: Any  # an array of all tokens, or what stands for one
        if is_url(prefix):
            from megalite.stores.token_files import CachedObject, StoredTokens

            self._bin = CachedObject(f"{prefix}.bin")
            self._check_length(f"{prefix}.bin", self._bin.size)
            self.tokens = StoredTokens(self._bin, self.dtype)
        else:
            if not self._bin.is_file():
                raise DataError(
                    f"{self._bin} does not exist. A token file consists of a .bin and an .idx file. Prepare "
                    "the data again with `megalite prepare`."
                )
            self._check_length(str(self._bin), self._bin.stat().st_size)
            self.tokens = np.memmap(self._bin, dtype=self.dtype, mode="r")
        self.metadata = metadata(prefix)
        self.vocab_size: int | None = self.metadata.get("vocab_size")
        self.eos: int | None = self.metadata.get("eos")
        self.preference: str | None = self.metadata.get("preference")
        self.loss = IndexedTokens(f"{prefix}.loss", LOSS_DTYPES) if is_chat(prefix) else None
        if self.loss is not None and not np.array_equal(self.loss.sizes, self.sizes):
            raise DataError(
                f"{prefix}.loss does not match the documents of {prefix}. Prepare the data again with "
                "`megalite prepare --chat`."
            )

    def digest_parts(self) -> list[bytes]:
        """Return bytes that identify the content without reading all of it.

        These are the sizes of both files and 16 pieces of 64 KiB, spread over each.
        """
        own = [part for path in (self._idx, self._bin) for part in _probe(path)]
        return own if self.loss is None else own + self.loss.digest_parts()

    def _check_length(self, name: str, actual: int) -> None:
        expected = len(self) * self.dtype.itemsize
        if actual != expected:
            raise DataError(
                f"{name} has {actual} bytes, but its .idx file expects {expected}. The file is "
                "truncated or belongs to another .idx file. Prepare the data again."
            )


def _probe(file: Path | CachedObject, pieces: int = 16, piece: int = 1 << 16) -> list[bytes]:
    size = file.stat().st_size if isinstance(file, Path) else file.size

    def read(start: int, stop: int) -> bytes:
        if not isinstance(file, Path):
            return file.read(start, stop)
        with file.open("rb") as opened:
            opened.seek(start)
            return opened.read(stop - start)

    if size <= pieces * piece:
        return [str(size).encode(), read(0, size)]
    starts = [(size - piece) * i // (pieces - 1) for i in range(pieces)]
    return [str(size).encode(), *(read(start, start + piece) for start in starts)]
