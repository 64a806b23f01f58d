"""Documents of a token file as shards, for data that is rewritten before it is packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megalite.data.dataset import TokenRange, digest
from megalite.data.streams.shard import StreamRecord

DOCUMENTS = 1024  # of a shard


class TokenShard:
    """Some consecutive documents of a token file, [first, last)."""

    noun = "document"

    def __init__(self, part: TokenRange, first: int, last: int, identity: list[Any]):
        self.path, self.identity, self.first = part.file.prefix, identity, first
        self._part, self._last = part, last

    def records(self, row: int = 0, offset: int = 0) -> Iterator[StreamRecord]:
        file, stop = self._part.file, self._part.stop
        marks = file.documents[self.first + row : self._last + 1]
        # of the sequences: a document may have several
        ends = np.append(file.pointers // file.dtype.itemsize, len(file))[marks]
        for number in range(len(ends) - 1):
            yield StreamRecord(row + number, 0, file.tokens[ends[number] : min(ends[number + 1], stop)])


def token_shards(part: TokenRange) -> list[TokenShard]:
    """Return the shards of the documents of a token file that begin in a range."""
    file = part.file
    content = digest(*file.digest_parts())
    starts = file.pointers[file.documents[file.documents < len(file.sizes)]] // file.dtype.itemsize
    first, last = np.searchsorted(starts, [part.start, part.stop]).tolist()
    return [
        TokenShard(part, at, min(at + DOCUMENTS, last), [content, at, part.stop])
        for at in range(first, last, DOCUMENTS)
    ]
