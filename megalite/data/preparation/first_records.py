"""A look at the first records of the input, so that records of another kind are reported before a tokenizer
is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from megalite.data.chat.records import BadRecord
from megalite.data.indexed import DataError
from megalite.data.preparation.sources import InputSource
from megalite.data.preparation.tasks import BadRecords, listed, records

SOURCES, RECORDS = 64, 1000
"""Maximum numbers of sources to look into, and of records in one."""


class Reader(Protocol):
    """Reads the records. `skip_bad`: how many may be bad."""

    @property
    def skip_bad(self) -> int: ...

    def check(self, record: Any, where: object) -> None: ...


def check_first(sources: Sequence[InputSource], reader: Reader) -> None:
    """Raise DataError if more records at the beginning of the sources are of another kind than may be
    skipped."""
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
                    f"--skip_bad {reader.skip_bad}: the input begins with more bad records. "
                    f"{bad.first[0].way_out}{reasons}"
                )


def _first(source: InputSource) -> Iterator[tuple[Any, object]]:
    """The records of the first task of a source; none if it holds texts. What is damaged is reported later,
    in the order of the input."""
    for task in islice(source.tasks(), 1):
        yield from ((record, where) for record, where, _ in records(task, BadRecords(skip=True)))
