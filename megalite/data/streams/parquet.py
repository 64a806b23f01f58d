"""Shards in Parquet, with the text in one column."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from megalite.data.indexed import DataError
from megalite.data.lone_surrogates import whole
from megalite.data.preparation.contents import Damage
from megalite.data.streams.shard import TEXT_KEY, StreamRecord, opened

BATCH = 256  # rows that are decoded at once


class ParquetShard:
    """A .parquet file. A row group is read only if a record of it, or of a later one, is needed."""

    noun, first = "row", 1

    def __init__(self, path: str, identity: list[Any], text_key: str):
        self.path, self.identity, self._key = path, identity, text_key

    def records(self, row: int = 0, offset: int = 0) -> Iterator[StreamRecord]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise DataError(
                f"{self.path}: reading Parquet requires pyarrow. Install it with "
                "`pip install 'megalite[data]'`."
            ) from None
        with opened(self.path) as (stream, _):
            try:
                file = parquet.ParquetFile(stream)
                self._check(file.schema_arrow, pyarrow)
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                ends = list(accumulate(sizes))
                groups = [i for i, end in enumerate(ends) if end > row]
                if not groups:
                    return
                number = ends[groups[0]] - sizes[groups[0]]
                for batch in file.iter_batches(BATCH, row_groups=groups, columns=[self._key]):
                    for value in batch.column(0):
                        if number >= row:
                            yield StreamRecord(number, 0, whole(value.as_py() or "")[0])
                        number += 1
            except pyarrow.ArrowException as error:
                raise Damage(str(error).splitlines()[0].rstrip(".")) from None

    def _check(self, schema: Any, pyarrow: Any) -> None:
        """Raise DataError if the text is not in a column of strings."""
        if self._key not in schema.names:
            raise DataError(
                f"{self.path} has no column {self._key}. Set {TEXT_KEY} to one of its columns: "
                f"{', '.join(schema.names)}."
            )
        kind = schema.field(self._key).type
        values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.null()):
            raise DataError(
                f"{self.path}: the column {self._key} is {kind}, not text. Set {TEXT_KEY} to a "
                "column of text."
            )
