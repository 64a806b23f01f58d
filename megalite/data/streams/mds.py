"""Shards of MDS, the format of MosaicML's streaming: a directory with index.json and binary shards.

index.json lists the shards with the names, encodings and sizes of their columns. A shard is little-endian:

    uint32       number of samples, n
    uint32[n+1]  byte at which each sample begins; the last one is the end
    text         the columns again, as JSON
    samples      uint32 sizes of the columns without a fixed size, then the columns
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from typing import Any

from megalite.data.indexed import DataError
from megalite.data.lone_surrogates import whole
from megalite.data.preparation.contents import Damage
from megalite.data.preparation.tasks import decoded
from megalite.data.streams.shard import TEXT_KEY, StreamRecord, asked, filesystem_of, opened

INDEX = "index.json"
TEXTS = ("str", "bytes", "json")
"""Encodings of a column that may hold text."""
COMPRESSIONS = ("zstd", "gz", "bz2")


class MdsShard:
    """A .mds file. `entry` is that of index.json."""

    noun, first = "sample", 0

    def __init__(self, path: str, identity: list[Any], text_key: str, entry: dict[str, Any]):
        self.path, self.identity, self._key = path, identity, text_key
        names = entry["column_names"]
        if text_key not in names:
            raise DataError(
                f"{path} has no column {text_key}. Set {TEXT_KEY} to one of its columns: {', '.join(names)}."
            )
        self._column = names.index(text_key)
        self._sizes: list[int | None] = entry["column_sizes"]
        self._encoding = str(entry["column_encodings"][self._column])
        self._samples = int(entry["samples"])
        if self._encoding not in TEXTS:
            raise DataError(
                f"{path}: the column {text_key} has the encoding {self._encoding}, not text "
                f"({', '.join(TEXTS)}). Set {TEXT_KEY} to a column of text."
            )

    def records(self, row: int = 0, offset: int = 0) -> Iterator[StreamRecord]:
        with opened(self.path) as (stream, seekable):
            file = stream if seekable else io.BytesIO(stream.read())
            (count,) = struct.unpack("<I", _exactly(file, 4))
            if count != self._samples:
                raise Damage(f"it has {count} samples, and {INDEX} says {self._samples}")
            offsets = struct.unpack(f"<{count + 1}I", _exactly(file, 4 * (count + 1)))
            for number in range(row, count):
                file.seek(offsets[number])
                yield self._record(number, _exactly(file, offsets[number + 1] - offsets[number]))

    def _record(self, row: int, raw: bytes) -> StreamRecord:
        variable = self._sizes.count(None)
        try:
            lengths = iter(struct.unpack_from(f"<{variable}I", raw))
            sizes = [next(lengths) if size is None else size for size in self._sizes]
            start = 4 * variable + sum(sizes[: self._column])
            value = raw[start : start + sizes[self._column]]
            if len(value) != sizes[self._column]:
                raise struct.error("it ends in the middle of a column")
            if self._encoding != "json":
                return StreamRecord(row, 0, decoded(value)[0])
            text = json.loads(value)
        except (struct.error, ValueError) as error:
            return StreamRecord(row, 0, problem=f" is damaged ({error})")
        if not isinstance(text, str):
            return StreamRecord(row, 0, problem=f" has a {type(text).__name__}, not a text, in {self._key}")
        return StreamRecord(row, 0, whole(text)[0])


def mds_shards(directory: str, text_key: str) -> list[MdsShard]:
    """Return the shards that DIRECTORY/index.json lists. Raises DataError if they are not of MDS."""
    index = f"{directory.rstrip('/')}/{INDEX}"
    system, path = filesystem_of(index)
    try:
        content = json.loads(asked(system, index, lambda: system.cat_file(path)))
        entries = content["shards"]
        return [_shard(directory, text_key, entry, index) for entry in entries]
    except FileNotFoundError:
        raise DataError(
            f"mds:{directory}: there is no {index}. Name a directory that MDSWriter wrote."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{index} is not the index of an MDS directory ({type(error).__name__}: {error}). Write it again."
        ) from None


def _shard(directory: str, text_key: str, entry: dict[str, Any], index: str) -> MdsShard:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise DataError(
            f"{index} lists a shard of format {entry['format']}, version {entry['version']}. Only mds, "
            "version 2, can be read. Write it again with MDSWriter."
        )
    compression = (entry["compression"] or "").split(":")[0]
    if compression and compression not in COMPRESSIONS:
        raise DataError(
            f"{index} lists a shard compressed with {compression}. Write it without compression, or with "
            f"{', '.join(COMPRESSIONS)}."
        )
    stored = entry["zip_data"] if compression else entry["raw_data"]
    identity = [stored["basename"], stored["bytes"]]
    return MdsShard(f"{directory.rstrip('/')}/{stored['basename']}", identity, text_key, entry)


def _exactly(file: Any, size: int) -> bytes:
    """Read `size` bytes. Raises Damage if the file ends before."""
    raw = file.read(size)
    if len(raw) != size:
        raise Damage("it is truncated")
    return bytes(raw)
