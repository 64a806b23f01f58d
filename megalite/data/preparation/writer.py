"""Writes the indexed token file that `megalite.data.indexed` describes: one sequence per document, and a loss mask for chat data."""

import json
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import DTYPES, HEADER, MAGIC, DataError, companion


def token_dtype(vocab_size: int) -> np.dtype:
    """The token type, as Megatron-LM chooses it: uint16 if the vocabulary fits, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedWriter:
    """Writes a token file as a stream, and with `masked` its PREFIX.loss; files have temporary names until `finish`.

    A context manager: exiting it without `finish`, or by an exception, removes the temporary files.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, masked: bool = False):
        self.prefix, self.dtype = Path(prefix), token_dtype(vocab_size)
        self.sizes = array("i")
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        endings = (*(("loss.bin", "loss.idx") if masked else ()), "bin", "json", "idx")
        self._temporary = {end: self.prefix.parent / f".{self.prefix.name}.{os.getpid()}.{end}" for end in endings}
        self._file = self._temporary["bin"].open("wb")
        self._loss = self._temporary["loss.bin"].open("wb") if masked else None

    def add(self, tokens: NDArray[np.integer], sizes: Iterable[int], mask: NDArray[np.uint8] | None = None) -> None:
        """Append documents. tokens: those of all documents; sizes: tokens of each; mask: 1 for each token whose loss is counted."""
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        if self._loss is not None:
            assert mask is not None and len(mask) == len(tokens)
            self._loss.write(mask.tobytes())
        self.sizes.extend(sizes)

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write the index and PREFIX.json, then give all files their final names, the index last: without it there is no token file."""
        if not self.sizes:
            raise DataError(f"{self.prefix}: the input holds no text. Nothing was written.")
        _close_to_disk(self._file)
        self._write_index("idx", self.dtype)
        if self._loss is not None:
            _close_to_disk(self._loss)
            self._write_index("loss.idx", np.dtype("u1"))
        with self._temporary["json"].open("w", encoding="utf-8") as text:
            text.write(json.dumps(metadata, indent=2) + "\n")
            _close_to_disk(text)
        for end in ("idx", "loss.idx", "loss.bin"):  # an older index or mask must never be read with the newer tokens
            companion(self.prefix, end).unlink(missing_ok=True)
        for end, path in self._temporary.items():
            path.replace(companion(self.prefix, end))

    def _write_index(self, ending: str, dtype: np.dtype) -> None:
        sizes = np.frombuffer(self.sizes, dtype=np.int32).astype("<i4", copy=False)
        ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
        with self._temporary[ending].open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
            file.write(sizes.tobytes())
            file.write((ends - sizes.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
            _close_to_disk(file)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._loss is not None:
            self._loss.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)


def _close_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
