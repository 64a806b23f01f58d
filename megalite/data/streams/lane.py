"""Lanes: sequences of rows that are independent of each other and of the mesh.

The shards of an epoch are put in an order, and lane l of L reads shards l, l + L, … of it. Its documents are
collected in a buffer, which is permuted, emptied, and filled again; they are tokenized and joined end to end.
Row r is tokens [r·S, r·S + S + 1), S inputs and their targets. After the last shard the next epoch begins.
Orders are keyed by (seed, epoch, content), as in `megalite.data.dataset`.

A `Position` says where a row begins. Reading continues there with one buffer of documents read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.data.dataset import permute
from megalite.data.fill_in_the_middle import FillInTheMiddle
from megalite.data.indexed import DataError
from megalite.data.preparation.contents import Damage
from megalite.data.streams.shard import Shard, StreamRecord, place
from megalite.data.tokenizer.tokenizers import Tokenizer
from megalite.system import rng

TOGETHER = 16  # documents that are tokenized in one call
EVERY, KEPT = 8, 512  # rows between the positions that are kept, and their number


class Position(NamedTuple):
    """Where a row of a lane begins.

    Attributes:
        row: the number of the row.
        epoch: passes over the shards.
        buffer: the number of the buffer in the epoch.
        shard: the place of a shard in the lane's order of the epoch: that of the buffer's first document.
        record, offset: that document in the shard (`StreamRecord`).
        document: documents of the buffer before the one with the row's first token.
        token: tokens of it before the row.
    """

    row: int = 0
    epoch: int = 0
    buffer: int = 0
    shard: int = 0
    record: int = 0
    offset: int = 0
    document: int = 0
    token: int = 0


class PlacedRecord(NamedTuple):
    """A record, its shard, and the place of the shard in the lane's order."""

    at: int
    shard: Shard
    record: StreamRecord


@dataclass(frozen=True)
class Reading:
    """How the lanes of a stream read.

    Attributes:
        shards: all shards of the stream.
        lanes: their number.
        buffer: documents that are shuffled together; 0: shards and documents are read in order.
        content: a hash of the content, which keys the orders.
        fim: rewrites documents; None: none is rewritten.
        skipped: called with the message about a bad record, which may raise it.
    """

    shards: Sequence[Shard]
    lanes: int
    sequence_length: int
    tokenizer: Tokenizer
    seed: int
    buffer: int
    content: str
    fim: FillInTheMiddle | None
    skipped: Callable[[str], None]

    def shards_of(self, lane: int, epoch: int) -> list[Shard]:
        """Return the shards of a lane in an epoch, in order."""
        count = len(self.shards)
        if not self.buffer:
            return [self.shards[i] for i in range(lane, count, self.lanes)]
        key = rng.key(self.seed, "shards", epoch, self.content)
        return [self.shards[permute(i, count, key)] for i in range(lane, count, self.lanes)]

    def order_of(self, lane: int, epoch: int, buffer: int, count: int) -> list[int]:
        """Return the order of the documents of a buffer."""
        if not self.buffer:
            return list(range(count))
        key = rng.key(self.seed, "buffer", epoch, lane, buffer, self.content)
        return [permute(i, count, key) for i in range(count)]

    def encoded(self, documents: Sequence[PlacedRecord], epoch: int) -> list[NDArray[np.int64]]:
        """Return the tokens of documents, which end in EOS."""
        done: list[NDArray[np.int64] | None] = [self._rewritten(each, epoch) for each in documents]
        texts = {
            i: each.record.content
            for i, each in enumerate(documents)
            if done[i] is None and isinstance(each.record.content, str)
        }
        encoded = iter(self.tokenizer.encode_batch(list(texts.values())))
        return [
            tokens
            if tokens is not None
            else self._ended(next(encoded))
            if i in texts
            else np.asarray(documents[i].record.content, np.int64)
            for i, tokens in enumerate(done)
        ]

    def _rewritten(self, document: PlacedRecord, epoch: int) -> NDArray[np.int64] | None:
        """Return the tokens of a document that fill-in-the-middle rewrites, or None."""
        if self.fim is None:
            return None
        key = rng.key(self.seed, "fim", epoch, *map(str, document.shard.identity), document.record.row)
        if not self.fim.chosen(key):
            return None
        text, ends = document.record.content, True
        if not isinstance(text, str):
            tokens = text.tolist()
            ends = tokens[-1] == self.tokenizer.eos  # what is held out may have cut the last one
            text = self.tokenizer.decode(tokens[: len(tokens) - ends])
        ids = self.fim.rewritten(text, key)
        return self._ended(ids) if ends else np.asarray(ids, np.int64)

    def _ended(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        return np.append(np.asarray(ids, np.int64), self.tokenizer.eos)


class Lane:
    """One lane of a stream. Rows are cheap to read in ascending order.

    Any other row is read from the last position that is known before it: `restored`, or one that was passed.
    """

    def __init__(self, number: int, reading: Reading):
        self._number, self._reading = number, reading
        self.restored = Position()
        self._passed: deque[Position] = deque(maxlen=KEPT)
        self._rows: Iterator[tuple[Position, NDArray[np.int64]]] = iter(())
        self._last: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def row(self, number: int) -> NDArray[np.int64]:
        """Return the tokens of a row, [sequence_length + 1].

        Raises DataError if a shard cannot be read, or if the lane has no text.
        """
        last, tokens = self._last
        if last == number:
            return tokens
        before = self.position(number)
        if last < 0 or number < last or last + 1 < before.row:
            self._rows = self._rows_from(before)
        self._last = (-1, tokens)  # until the row is read: an error ends the reading
        for position, tokens in self._rows:
            if position.row % EVERY == 0 and (not self._passed or position.row > self._passed[-1].row):
                self._passed.append(position)
            if position.row == number:
                self._last = (number, tokens)
                return tokens
        raise AssertionError("a lane has no end")

    def position(self, row: int) -> Position:
        """Return the last known position at or before a row. May be called while another thread reads."""
        known = (Position(), self.restored, *list(self._passed))
        return max((each for each in known if each.row <= row), key=lambda each: each.row)

    def _rows_from(self, start: Position) -> Iterator[tuple[Position, NDArray[np.int64]]]:
        length, row, available = self._reading.sequence_length, start.row, 0
        waiting: deque[tuple[Position, NDArray[np.int64]]] = deque()  # what is left of documents
        for position, tokens in self._documents_from(start):
            waiting.append((position, tokens[position.token :]))
            available += len(tokens) - position.token
            while available > length:
                pieces, missing = [], length + 1
                for _, rest in waiting:
                    pieces.append(rest[:missing])
                    if (missing := missing - len(pieces[-1])) == 0:
                        break
                yield waiting[0][0]._replace(row=row), np.concatenate(pieces)
                row, available, used = row + 1, available - length, length
                while used >= len(waiting[0][1]):
                    used -= len(waiting.popleft()[1])
                first, rest = waiting[0]
                waiting[0] = (first._replace(token=first.token + used), rest[used:])

    def _documents_from(self, start: Position) -> Iterator[tuple[Position, NDArray[np.int64]]]:
        """Yield the tokens of all documents from a position on, which is that of the first one's part."""
        reading, first, skipped = self._reading, start.document, start.token
        for epoch, number, buffer in self._buffers_from(start):
            order = reading.order_of(self._number, epoch, number, len(buffer))
            at = buffer[0].at, buffer[0].record.row, buffer[0].record.offset
            for begin in range(first, len(order), TOGETHER):
                chosen = order[begin : begin + TOGETHER]
                for i, tokens in enumerate(reading.encoded([buffer[k] for k in chosen], epoch), begin):
                    yield Position(0, epoch, number, *at, i, skipped), tokens
                    skipped = 0
            first = 0

    def _buffers_from(self, start: Position) -> Iterator[tuple[int, int, list[PlacedRecord]]]:
        """Yield epoch and number of each buffer, and its documents."""
        epoch, number, at = start.epoch, start.buffer, (start.shard, start.record, start.offset)
        size, empty = self._reading.buffer or TOGETHER, 0
        while empty < 2:  # the rest of an epoch may be empty, and not all of the next one
            records, empty = self._records_from(epoch, *at), empty + 1
            while buffer := list(islice(records, size)):
                yield epoch, number, buffer
                number, empty = number + 1, 0
            epoch, number, at = epoch + 1, 0, (0, 0, 0)
        names = ", ".join(shard.path for shard in self._reading.shards_of(self._number, epoch))
        raise DataError(f"the stream has no text in {names}. Remove what is empty, or lower data.lanes.")

    def _records_from(self, epoch: int, first: int, row: int, offset: int) -> Iterator[PlacedRecord]:
        """Yield the records with text of an epoch, from one in the shard at `first` on."""
        for at, shard in enumerate(self._reading.shards_of(self._number, epoch)[first:], first):
            last = row - 1
            try:
                for record in shard.records(row, offset):
                    last = record.row
                    if record.problem:
                        self._reading.skipped(f"{place(shard, record.row)}{record.problem}")
                    elif len(record.content):
                        yield PlacedRecord(at, shard, record)
            except Damage as error:  # not skipped: a store may fail now and not later
                raise DataError(
                    f"{place(shard, last + 1)} could not be read: {error}. Copy the file again, or remove it."
                ) from None
            row = offset = 0
