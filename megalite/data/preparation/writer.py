"""Writer of indexed token files, with one sequence per document and, for chat data, what counts in the loss.

The format is described in `megalite.data.indexed`.
"""

import json
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.samples import DTYPES, HEADER, MAGIC, DataError
from megalite.data.indexed import LOSS_DTYPES, companion
from megalite.data.preparation.encoded import token_dtype

MASK, WEIGHTS = "loss.bin", "weights.bin"
"""Endings of the temporary files of PREFIX.loss, as uint8 and as float32."""
LONGEST = (1 << 31) - 1  # tokens of a document: the index has 32 bits for it


def temporary(prefix: Path, ending: str) -> Path:
    """Return the temporary name of a file.

    It does not depend on the process, so that a later process can resume.
    """
    return prefix.parent / f".{prefix.name}.preparing.{ending}"


class IndexedWriter:
    """Writes a token file sequentially, with `masked` also its PREFIX.loss.

    PREFIX.loss is uint8 until weights are added; what was written before is then copied as float32.

    Files have temporary names until `finish`. As a context manager, the writer removes them on exit without
    `finish` or by an exception, unless `kept` is set. With `position`, the result of another writer's
    `position()`, it truncates the temporary files of that writer to it and continues them.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocab_size: int,
        masked: bool = False,
        position: dict[str, int] | None = None,
    ):
        self.prefix, self.dtype, self.kept = Path(prefix), token_dtype(vocab_size), False
        self.sizes = array("i")
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._loss = None if not masked else WEIGHTS if position and WEIGHTS in position else MASK
        endings = ("bin", "json", "idx", "sizes") + ((MASK, WEIGHTS, "loss.idx") if masked else ())
        self._temporary = {end: temporary(self.prefix, end) for end in endings}
        self._streams = {
            end: self._temporary[end].open("r+b" if position else "wb")
            for end in ("bin", "sizes", self._loss)
            if end is not None
        }
        self._file, self._sizes_file = self._streams["bin"], self._streams["sizes"]
        if position is not None:
            self._continue(position)

    @property
    def loss_dtype(self) -> np.dtype:
        """Type of the elements of PREFIX.loss."""
        return np.dtype("<f4" if self._loss == WEIGHTS else "u1")

    def add(
        self,
        tokens: NDArray[np.integer],
        sizes: Iterable[int],
        mask: NDArray[np.uint8 | np.float32] | None = None,
        continues: bool = False,
    ) -> None:
        """Append documents.

        Args:
            tokens: tokens of all documents, concatenated.
            sizes: number of tokens of each document.
            mask: uint8, 1 for each token whose loss is counted, or float32, the weights of the tokens.
            continues: the first entry continues the last document that was added.
        """
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        if self._loss is not None:
            assert mask is not None and len(mask) == len(tokens)
            if mask.dtype.kind == "f" and self._loss == MASK:
                self._widen()
            self._streams[self._loss].write(mask.astype(self.loss_dtype, copy=False).tobytes())
        values = sizes if isinstance(sizes, np.ndarray) else list(sizes)
        lengths = np.array(values, np.int64)  # a copy, changed below
        if continues:
            lengths[0] += self.sizes.pop()
        if lengths.max(initial=0) > LONGEST:
            raise DataError(
                f"{self.prefix}: a document has more than {LONGEST:,} tokens, the maximum of the file "
                "format. Split the document."
            )
        self.sizes.frombytes(lengths.astype(np.intc).tobytes())

    def _widen(self) -> None:
        """Continue PREFIX.loss as float32. The mask stays, because an earlier position may be resumed."""
        self._streams.pop(MASK).close()
        self._loss = WEIGHTS
        self._streams[WEIGHTS] = self._temporary[WEIGHTS].open("wb")
        with self._temporary[MASK].open("rb") as file:
            while piece := file.read(1 << 20):
                self._streams[WEIGHTS].write(np.frombuffer(piece, "u1").astype(self.loss_dtype).tobytes())

    def position(self) -> dict[str, int]:
        """Sync the temporary files and return their sizes and the size of the last document, which may
        continue.
        """
        if not self.sizes:
            return dict.fromkeys((*self._streams, "last"), 0)
        stored = self._sizes_file.tell() // self.sizes.itemsize
        self._sizes_file.write(self.sizes[stored:-1].tobytes())
        for file in self._streams.values():
            file.flush()
            os.fsync(file.fileno())
        return {end: file.tell() for end, file in self._streams.items()} | {"last": self.sizes[-1]}

    def _continue(self, position: dict[str, int]) -> None:
        """Open the temporary files at a position. Raises OSError or EOFError if they are shorter."""
        for end, file in self._streams.items():
            if file.seek(0, 2) < position[end]:
                raise EOFError(f"{self._temporary[end]} has fewer than {position[end]} bytes")
            file.truncate(position[end])
        self._sizes_file.seek(0)
        self.sizes.frombytes(self._sizes_file.read())
        if position["bin"]:
            self.sizes.append(position["last"])
        for file in self._streams.values():
            file.seek(0, 2)

    def finish(self, metadata: dict[str, Any], may_be_empty: bool = False) -> None:
        """Write the index and PREFIX.json, then rename all files to their final names.

        The index is renamed last, because a token file without it does not count as complete.

        Raises DataError if there are no documents, unless it `may_be_empty`.
        """
        if not (self.sizes or may_be_empty):
            raise DataError(f"{self.prefix}: the input contains no text. Nothing was written.")
        _close_to_disk(self._file)
        self._write_index("idx", self.dtype)
        if self._loss is not None:
            _close_to_disk(self._streams[self._loss])
            self._write_index("loss.idx", self.loss_dtype)
        with self._temporary["json"].open("w", encoding="utf-8") as text:
            text.write(json.dumps(metadata, indent=2) + "\n")
            _close_to_disk(text)
        # an older index or mask must never be read with the newer tokens
        for end in ("idx", "loss.idx", "loss.bin"):
            companion(self.prefix, end).unlink(missing_ok=True)
        if self._loss is not None:
            self._temporary[self._loss].replace(companion(self.prefix, "loss.bin"))
        for end in ("loss.idx", "bin", "json", "idx"):
            if end in self._temporary:
                self._temporary[end].replace(companion(self.prefix, end))

    def _write_index(self, ending: str, dtype: np.dtype) -> None:
        sizes = np.frombuffer(self.sizes, dtype=np.int32).astype("<i4", copy=False)
        ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
        code = next(code for code, name in (DTYPES | LOSS_DTYPES).items() if np.dtype(name) == dtype)
        with self._temporary[ending].open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
            file.write(sizes.tobytes())
            file.write((ends - sizes.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
            _close_to_disk(file)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._streams.values():
            file.close()
        for path in self._temporary.values():
            if not self.kept:
                path.unlink(missing_ok=True)


def _close_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
