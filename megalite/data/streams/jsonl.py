"""Shards of one JSON object per line, which may be compressed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from megalite.data.chat.records import BadRecord
from megalite.data.lone_surrogates import parsed
from megalite.data.preparation.contents import without_mark
from megalite.data.preparation.tasks import decoded, text_of
from megalite.data.streams.shard import TEXT_KEY, StreamRecord, opened


class JsonLinesShard:
    """A .jsonl file."""

    noun, first = "line", 1

    def __init__(self, path: str, identity: list[Any], text_key: str):
        self.path, self.identity, self._key = path, identity, text_key

    def records(self, row: int = 0, offset: int = 0) -> Iterator[StreamRecord]:
        with opened(self.path) as (file, seekable):
            if seekable:
                file.seek(offset)
            else:
                for _ in range(row):
                    file.readline()
            for number in count(row):
                if not (line := file.readline()):
                    return
                if line.strip():
                    yield parsed_text(number, offset, line, self._key)
                offset += len(line)


def parsed_text(row: int, offset: int, raw: bytes, key: str) -> StreamRecord:
    """Return the record of an object in JSON, whose text is at a key."""
    try:
        value, _ = parsed(decoded(without_mark(raw))[0])
    except (ValueError, RecursionError) as error:
        return StreamRecord(row, offset, problem=f" is not valid JSON ({error})")
    try:
        return StreamRecord(row, offset, text_of(value, "", key, TEXT_KEY))
    except BadRecord as error:
        return StreamRecord(row, offset, problem=str(error).rstrip("."))
