"""Streams as datasets: documents are read and tokenized while a run trains.

Sample i is row i div L of lane i mod L (`lane.py`). A rank reads the lanes of its samples: with L a multiple
of dp · micro_batch_size no other rank reads these. The order of samples depends on the data, its options and
the seed, and on nothing else.

A checkpoint has the positions of all lanes, of which each rank knows its own (`Streamed.positions`). They are
a part of no mesh, and only save time: from any of them, and without them, the samples are the same.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megalite.config.samples import Member
from megalite.config.sections.data import DataConfig
from megalite.config.streams import ENDLESS
from megalite.data.dataset import Dataset, Sample, digest
from megalite.data.fill_in_the_middle import FillInTheMiddle
from megalite.data.indexed import DataError
from megalite.data.streams.lane import Lane, Position, Reading
from megalite.data.streams.shard import Shard
from megalite.data.tokenizer.identity import of_tokenizer
from megalite.data.tokenizer.tokenizers import Tokenizer
from megalite.system.messages import say

MOST_LANES = 64  # without data.lanes
SHOWN = 10  # bad records that a process reports


class Streamed(Dataset):
    """Base class of datasets with lanes.

    Attributes:
        lanes: their number.
        width: numbers of a position.
    """

    lanes: int
    width: int

    @abstractmethod
    def position(self, lane: int, row: int) -> list[int]:
        """Return the last known position at or before a row of a lane, `width` numbers."""

    @abstractmethod
    def restore(self, lane: int, position: list[int]) -> None:
        """Take over a position of another process."""

    def positions(self, lanes: Sequence[int], samples: int) -> NDArray[np.int64]:
        """Return the positions of some lanes after `samples` samples, [lanes, width]."""
        rows = [len(range(lane, samples, self.lanes)) for lane in lanes]
        return np.array(
            [self.position(lane, row) for lane, row in zip(lanes, rows, strict=True)], np.int64
        ).reshape(len(lanes), self.width)


class Stream(Streamed):
    """The documents of shards, packed into rows.

    Args:
        name: for messages.
        shuffle: of shards and buffers, in each epoch; else both are read in order.
    """

    width = len(Position._fields)

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        tokenizer: Tokenizer,
        config: DataConfig,
        lanes: int,
        *,
        seed: int,
        shuffle: bool,
        fim: FillInTheMiddle | None = None,
    ):
        self.lanes, self.samples_per_epoch = lanes, ENDLESS
        self.vocab_size, self.eos = tokenizer.vocab_size, tokenizer.eos
        self.members = [Member(name, ENDLESS)]
        content = digest(*(json.dumps(shard.identity).encode() for shard in shards))
        buffer = config.shuffle_buffer if shuffle else 0
        self.fingerprint = digest(
            json.dumps(
                [
                    *(content, lanes, config.sequence_length, buffer, seed if shuffle or fim else None),
                    *(
                        config.text_key,
                        config.bad_records,
                        of_tokenizer(tokenizer.name).digest,
                        tokenizer.eos,
                    ),
                    fim and fim.identity,
                ]
            ).encode()
        )
        reported = partial(_reported, skip=config.bad_records == "skip", before=[])
        reading = Reading(
            shards, lanes, config.sequence_length, tokenizer, seed, buffer, content, fim, reported
        )
        self._lanes = [Lane(number, reading) for number in range(lanes)]

    def __getitem__(self, index: int) -> Sample:
        row, lane = divmod(index, self.lanes)
        tokens = self._lanes[lane].row(row)
        return Sample(tokens[:-1], tokens[1:])

    def position(self, lane: int, row: int) -> list[int]:
        return list(self._lanes[lane].position(row))

    def restore(self, lane: int, position: list[int]) -> None:
        self._lanes[lane].restored = Position(*position)


def _reported(message: str, skip: bool, before: list[str]) -> None:
    """Raise DataError about a bad record, or report that it is skipped, unless it is one of `before`."""
    if not skip:
        raise DataError(f"{message}. Correct the file, or set data.bad_records to skip.")
    if message not in before and len(before) < SHOWN:
        before.append(message)
        last = f" (the last of {SHOWN} that are reported)" if len(before) == SHOWN else ""
        say(f"skipped: {message}{last}")


def lanes_for(config: DataConfig, shards: dict[str, int]) -> int:
    """Return the number of lanes of streams.

    Args:
        shards: the number of shards of each stream; empty: there is none, and one lane.

    Raises:
        DataError: there are more lanes than shards.
    """
    if not shards:
        return 1
    name, fewest = min(shards.items(), key=lambda item: item[1])
    if config.lanes is None:
        return 1 << min(MOST_LANES, fewest).bit_length() - 1
    if config.lanes > fewest:
        raise DataError(
            f"data.lanes = {config.lanes} is more than the shards of {name}, which has {fewest}. Set "
            f"it to at most {fewest}, or write more shards."
        )
    return config.lanes
