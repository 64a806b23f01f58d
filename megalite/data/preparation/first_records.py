"""Check of the first records, which reports a wrong format before a tokenizer is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from megalite.data.chat.records import KEYS_OF_RECORDS, BadRecord
from megalite.data.indexed import DataError
from megalite.data.preparation.sources import InputSource
from megalite.data.preparation.tasks import BadRecords, listed, records
from megalite.system.messages import counted

SOURCES, RECORDS = 64, 1000
"""Maximum number of sources to check, and of records in each."""


class Reader(Protocol):
    """Reader of records. `skip_bad` is the number of bad records that are allowed."""

    @property
    def skip_bad(self) -> int: ...

    def check(self, record: Any, where: object) -> None: ...


def check_first(sources: Sequence[InputSource], reader: Reader) -> None:
    """Raise DataError if the sources begin with more bad records than may be skipped."""
    bad = BadRecords(reader.skip_bad > 0)
    for source in sources[:SOURCES]:
        for record, where in islice(_first(source), RECORDS):
            try:
                reader.check(record, where)
            except BadRecord as error:
                bad.add(error)
            else:
                break  # the others are probably like this one
            if bad.count > reader.skip_bad:
                reasons = listed([error.reason for error in bad.first])
                raise DataError(
                    f"The input starts with more bad records than --skip_bad {reader.skip_bad} allows. "
                    f"{bad.first[0].way_out}{reasons}"
                )


def first_records(sources: Sequence[InputSource]) -> Iterator[tuple[Any, object]]:
    """Yield the first records of the sources with their locations."""
    for source in sources[:SOURCES]:
        yield from islice(_first(source), RECORDS)


def unknown_names(sources: Sequence[InputSource], keys: Sequence[tuple[str, str]]) -> list[str]:
    """Describe names of keys that no record has.

    Args:
        keys: (ours, theirs), as in `RecordReader`.

    Returns:
        Lines for the user, one for each name that none of the first records has.
    """
    left, count = dict(keys), 0
    names: dict[str, None] = {}
    for record, _ in first_records(sources):
        left = {ours: theirs for ours, theirs in left.items() if not _has(record, ours, theirs)}
        if not left:
            return []
        count += 1
        names |= dict.fromkeys(record if isinstance(record, dict) else ())
    return [
        f"WARNING: --keys {ours}={theirs} has no effect: none of the first {counted(count, 'record')} has "
        f"{theirs}; their keys are {', '.join(names) or 'none'}"
        for ours, theirs in left.items()
        if count
    ]


def _has(record: Any, ours: str, theirs: str) -> bool:
    """Return whether a record, or one of its messages, has a name of a key."""
    return isinstance(record, dict) and theirs in (record if ours in KEYS_OF_RECORDS else str(record))


def _first(source: InputSource) -> Iterator[tuple[Any, object]]:
    """Yield the records of the first task of a source.

    Texts have none. Damage is reported later, in the order of the input.
    """
    for task in islice(source.tasks(), 1):
        yield from ((record, where) for record, where, _ in records(task, BadRecords(skip=True)))
