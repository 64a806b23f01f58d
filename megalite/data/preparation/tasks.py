"""A task: plain data from which a worker makes documents. Files are named by it and read by the worker, not
sent to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.data.chat.record_hints import TEXT_KEY, for_texts
from megalite.data.chat.records import BadRecord
from megalite.data.indexed import DataError
from megalite.data.lone_surrogates import parsed, whole
from megalite.data.preparation.contents import Damage, contents, not_text, without_mark

SHOWN = 10  # bad records that a message lists


@dataclass(frozen=True)
class ByteRange:
    """A range of bytes of a file, cut without reading it. What begins in the range belongs to it."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Task:
    """About as many bytes of input as `size`, for progress.

    Attributes:
        files: whole text files.
        piece: a range of a text file that is too long for one task.
        span: the lines of JSON that begin in a range of a file.
        lines: (number, line) of records as JSON; `source` names their origin.
        texts: documents.
        damage: what could not be read.
    """

    size: int
    files: tuple[Path, ...] = ()
    piece: ByteRange | None = None
    span: ByteRange | None = None
    lines: tuple[tuple[int, bytes], ...] = ()
    texts: tuple[str, ...] = ()
    source: str = ""
    damage: tuple[BadRecord, ...] = ()


@dataclass(frozen=True)
class Numbered:
    """A record's place by its number."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source} {self.number}"


@dataclass(frozen=True)
class LineAt:
    """A line's place by its first byte; its number is counted when it is shown, which reads the file up to
    it."""

    path: Path
    offset: int

    def __str__(self) -> str:
        lines, left = 1, self.offset
        with self.path.open("rb") as file:
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                lines, left = lines + chunk.count(b"\n"), left - len(chunk)
        return f"{self.path} line {lines}"


@dataclass
class BadRecords:
    """The bad records of a task: skipped, or with `skip` false the first one ends the preparation.

    Attributes: `count`, and `first`, the first SHOWN of them.
    """

    skip: bool
    count: int = 0
    first: list[BadRecord] = field(default_factory=list)

    def add(self, error: BadRecord) -> None:
        """Skip a record. Raises DataError if none may be skipped."""
        if not self.skip:
            raise DataError(f"{error} --skip_bad N skips up to N such records.")
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(error)


def listed(reasons: list[str]) -> str:
    """Why records are bad, a line each."""
    return "".join(f"\n  {reason}" for reason in reasons)


def lines_of(span: ByteRange) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a range, each with its first byte."""
    with span.path.open("rb") as file:
        at = span.start
        if at > 0:  # the line before the range ends in it, unless it ended just before
            file.seek(at - 1)
            rest = file.readline(span.stop - at + 1)
            if not rest.endswith(b"\n"):
                return
            at += len(rest) - 1
        while at < span.stop and (line := file.readline()):
            yield at, line
            at += len(line)


def documents(task: Task, text_key: str, bad: BadRecords) -> Iterator[tuple[str, bool]]:
    """A task's documents, and for each whether it had invalid Unicode, which is replaced by U+FFFD. Pieces of
    long texts are not read."""
    for path in task.files:
        try:
            raw = contents(path)
        except Damage as error:
            bad.add(BadRecord(f"--input {path}", f" cannot be read: {error}."))
            continue
        if (found := not_text(raw)) is not None:
            bad.add(BadRecord(f"--input {path}", f" {found[0]}.", found[1]))
        else:
            yield decoded(without_mark(raw))
    for record, where, replaced in records(task, bad):
        try:
            text = text_of(record, where, text_key)
        except BadRecord as error:
            bad.add(error)
        else:
            yield text, replaced
    for text in task.texts:
        yield whole(text)


def records(task: Task, bad: BadRecords) -> Iterator[tuple[Any, object, bool]]:
    """A task's records of JSON, the place of each, and whether it had invalid Unicode, which is replaced by
    U+FFFD."""
    for damage in task.damage:
        bad.add(damage)
    for where, line in _lines(task, bad):
        if line.strip():
            # of a file, or of one of those that were put together
            text, invalid = decoded(without_mark(line))
            try:
                record, replaced = parsed(text)
            except (ValueError, RecursionError) as error:
                bad.add(
                    BadRecord(
                        where, f" is not JSON ({error}).", "A .jsonl file holds one JSON object a line."
                    )
                )
            else:
                yield record, where, replaced or invalid


def _lines(task: Task, bad: BadRecords) -> Iterator[tuple[object, bytes]]:
    for number, line in task.lines:
        yield Numbered(task.source, number), line
    if task.span is not None:
        try:
            for offset, line in lines_of(task.span):
                yield LineAt(task.span.path, offset), line
        except OSError as error:  # a part of the file: no record to skip
            raise DataError(f"--input {task.span.path} cannot be read any more: {error.strerror}.") from None


def decoded(raw: bytes) -> tuple[str, bool]:
    """UTF-8 as text, and whether it had invalid bytes, which are replaced by U+FFFD."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def text_of(record: Any, where: object, text_key: str) -> str:
    """The text of a record, or the record itself if it is a string and TEXT_KEY is asked for; null is an
    empty text, as in a .parquet.

    Raises BadRecord with `where` and the reason if it has none.
    """
    if isinstance(record, str):
        if text_key == TEXT_KEY:
            return record
        raise BadRecord(
            where,
            f" is a string, not an object with --text_key {text_key}.",
            "Leave out --text_key to read strings as texts.",
        )
    if not isinstance(record, dict):
        raise BadRecord(
            where,
            f" is a {type(record).__name__}, not an object.",
            "A .jsonl file holds one JSON object a line.",
        )
    if text_key not in record:
        keys = ", ".join(record)
        way_out = for_texts(record) or "Choose the one that holds the text."
        raise BadRecord(where, f" has no --text_key {text_key}; its keys: {keys}.", way_out)
    if record[text_key] is None:
        return ""
    if not isinstance(record[text_key], str):
        kind = type(record[text_key]).__name__
        way_out = for_texts(record) or "Choose the key that holds the text."
        raise BadRecord(where, f": --text_key {text_key} is of type {kind}, not text.", way_out)
    return record[text_key]
