"""A preparation in shards, by any number of machines, and the token file that they make together.

Shard i of n takes the documents that begin in the i-th of n equal parts of the input, so that the shards in
their order have all documents in the order of the input. A file that one process must read from its beginning
(.csv, .parquet, a compressed one, hf:) is in one shard. Merging reads the shards in place of the input, and
goes on as any preparation: the files are those of a single one, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.token_files import is_chat, metadata
from megalite.data.chat.records import BadRecord
from megalite.data.indexed import DataError, IndexedTokens, companion
from megalite.data.preparation.encoded import Encoded
from megalite.data.preparation.journal import key_of
from megalite.data.preparation.sources import InputSource, JsonLines, TextFiles
from megalite.data.preparation.tasks import Task

ENTRY = "shard"
"""The key of PREFIX.json that only a shard has."""
PIECE = 1 << 24  # tokens that a merge reads at once
ENDINGS = ("idx", "bin", "loss.idx", "loss.bin", "json")


@dataclass(frozen=True)
class PreparationShard:
    """Shard `number` of `count`, counted from 1, of the token file `whole`."""

    whole: Path
    number: int
    count: int

    @classmethod
    def parsed(cls, whole: Path, text: str) -> PreparationShard:
        """Parse I/N. Raises DataError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise DataError(f"--shard {text} is not I/N with 1 <= I <= N, for example 3/8.")
        return cls(whole, int(match[1]), int(match[2]))

    @property
    def prefix(self) -> Path:
        """Return the PREFIX of the shard's files, beside those of the whole."""
        return self.whole.parent / f"{self.whole.name}-{self.number:05}-of-{self.count:05}"

    def key(self, whole: str) -> str:
        """Return the key of the shard, given that of the whole preparation."""
        return key_of(whole, self.number, self.count)

    def tasks(self, sources: Sequence[InputSource]) -> Iterator[Task]:
        """Yield the tasks of the shard. Others are not read."""
        total = sum(source.size for source in sources)
        low = total * (self.number - 1) // self.count
        high = total * self.number // self.count if self.number < self.count else total + 1

        at = 0
        for source in sources:
            if not _is_divisible(source):
                if low <= at < high:
                    yield from source.tasks()
            elif at < high and low <= at + source.size:
                begin = here = at
                for task in source.tasks():
                    if task.piece is None or task.piece.start == 0:  # a document is in one shard
                        begin = here
                    if low <= begin < high:
                        yield task
                    here += task.size
            at += source.size


def _is_divisible(source: InputSource) -> bool:
    """Return whether the tasks of a source can be told apart without reading what comes before."""
    return isinstance(source, TextFiles) or (isinstance(source, JsonLines) and not source.compressed)


@dataclass(frozen=True)
class Merge:
    """The token file `whole`, made of its shards."""

    whole: Path

    @property
    def prefix(self) -> Path:
        """Return the PREFIX of its files."""
        return self.whole


def _present(prefix: Path) -> list[PreparationShard]:
    """Return the shards of a PREFIX that have a PREFIX.json."""
    pattern = re.compile(re.escape(prefix.name) + r"-(\d{5,})-of-(\d{5,})\.json")
    matches = [pattern.fullmatch(path.name) for path in prefix.parent.glob(f"{prefix.name}-*-of-*.json")]
    return [PreparationShard(prefix, int(match[1]), int(match[2])) for match in matches if match]


def _is_of(shard: PreparationShard, key: str) -> bool:
    return bool(metadata(shard.prefix).get(ENTRY, {}).get("key") == key)


def remaining_shards(prefix: Path, key: str) -> list[PreparationShard]:
    """Return the shards that a merge has not removed, because it was killed.

    Args:
        key: that of the whole preparation.
    """
    return [shard for shard in _present(prefix) if _is_of(shard, key)]


def complete_shards(prefix: Path, key: str) -> list[PreparationShard]:
    """Return all shards of a preparation.

    Args:
        key: that of the whole preparation.

    Raises:
        DataError: some are missing, or were made of other inputs or with other options.
    """
    counts = sorted({shard.count for shard in _present(prefix)})
    if not counts:
        raise DataError(f"--merge: there are no shards of {prefix}. Run the command with --shard I/N before.")
    if len(counts) > 1:
        listed = " and ".join(map(str, counts))
        raise DataError(
            f"--merge: {prefix} has shards of {listed}. Remove the files PREFIX-I-of-N of all but one number."
        )
    shards = [PreparationShard(prefix, number, counts[0]) for number in range(1, counts[0] + 1)]
    missing = [shard for shard in shards if not companion(shard.prefix, "idx").is_file()]
    if missing:
        listed = ", ".join(str(shard.number) for shard in missing[:10]) + (
            "" if len(missing) <= 10 else ", …"
        )
        raise DataError(
            f"--merge: of {counts[0]} shards of {prefix} not all are complete (missing: {listed}). Run "
            f"them again with --shard {missing[0].number}/{counts[0]}."
        )
    for shard in shards:
        if not _is_of(shard, key):
            raise DataError(
                f"--merge: {shard.prefix} was prepared from other inputs or with other options. Give "
                "the same command with --merge in place of --shard I/N, or prepare the shards again."
            )
    return shards


def entry_of(key: str) -> dict[str, Any]:
    """Return the entry of a shard's PREFIX.json.

    Args:
        key: that of the whole preparation.
    """
    return {ENTRY: {"key": key}}


def merged_parts(shards: Sequence[PreparationShard]) -> Iterator[Encoded]:
    """Yield the documents of all shards, in order, with what was counted when they were tokenized."""
    for shard in shards:
        place = shard.prefix
        facts = metadata(place)["preparation"]
        counted = Encoded(
            facts["input_bytes"],
            mask=np.empty(0, np.uint8) if is_chat(place) else None,
            empty=facts["empty_documents"],
            replaced=facts["replaced_documents"],
            too_long=facts["too_long"],
            shortest_too_long=facts["shortest_too_long"],
            without_loss=facts["without_loss"],
            bad=facts["skipped"],
            bad_first=[BadRecord(reason, "") for reason in facts["skipped_first"]],
            forms=set(facts["forms"]),
            chosen=facts["chosen"],
            rejected=facts["rejected"],
            equal=facts["equal"],
        )
        yield counted
        if companion(place, "bin").stat().st_size:
            yield from _documents(IndexedTokens(place))


def _documents(file: IndexedTokens) -> Iterator[Encoded]:
    ends = np.cumsum(file.sizes, dtype=np.int64)
    first = start = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, start + PIECE, side="right")))
        stop = int(ends[last - 1])
        yield Encoded(
            0,
            tokens=file.tokens[start:stop],
            sizes=np.asarray(file.sizes[first:last]),
            mask=None if file.loss is None else file.loss.tokens[start:stop],
        )
        first, start = last, stop


def remove(shards: Sequence[PreparationShard]) -> None:
    """Remove the files of shards."""
    for shard in shards:
        for ending in ENDINGS:
            companion(shard.prefix, ending).unlink(missing_ok=True)
