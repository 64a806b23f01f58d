"""Tasks: plain data from which workers create documents.

A task names files, which the worker reads itself: they are not sent to it.
"""

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
    """A byte range of a file. It contains whatever begins in the range."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Task:
    """A unit of work with about `size` bytes of input, used for progress.

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
    """Location of a record by its number."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source} {self.number}"


@dataclass(frozen=True)
class LineAt:
    """Location of a line by the offset of its first byte.

    The line number is counted when it is shown, which reads the file up to the line.
    """

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
    """The bad records of a task. With `skip` false, the first one ends the preparation.

    Attributes:
        count: their number.
        first: the first SHOWN of them.
    """

    skip: bool
    count: int = 0
    first: list[BadRecord] = field(default_factory=list)

    def add(self, error: BadRecord) -> None:
        """Skip a record. Raises DataError if no record may be skipped."""
        if not self.skip:
            raise DataError(f"{error} Pass --skip_bad N to skip up to N bad records.")
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(error)


def listed(reasons: list[str]) -> str:
    """Format reasons, one per line."""
    return "".join(f"\n  {reason}" for reason in reasons)


def lines_of(span: ByteRange) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a range, with the offset of their first byte."""
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
    """Yield the documents of a task, and whether invalid Unicode in them was replaced by U+FFFD.

    Pieces of long texts are not read.
    """
    for path in task.files:
        try:
            raw = contents(path)
        except Damage as error:
            bad.add(BadRecord(f"--input {path}", f" could not be read: {error}."))
            continue
        if (problem := not_text(raw)) is not None:
            bad.add(BadRecord(f"--input {path}", f" {problem[0]}.", problem[1]))
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
    """Yield the JSON records of a task with their locations, and whether invalid Unicode was replaced."""
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
                        where,
                        f" is not valid JSON ({error}).",
                        "A .jsonl file must contain one JSON object per line.",
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
            raise DataError(f"Failed to read --input {task.span.path}: {error.strerror}.") from None


def decoded(raw: bytes) -> tuple[str, bool]:
    """Decode UTF-8, and return whether invalid bytes were replaced by U+FFFD."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def text_of(record: Any, where: object, text_key: str, option: str = "--text_key") -> str:
    """Return the text of a record.

    A record that is a string is its own text if TEXT_KEY is requested. As in .parquet files, null is an empty
    text.

    Raises BadRecord with `where` and the reason if it has none.
    """
    if isinstance(record, str):
        if text_key == TEXT_KEY:
            return record
        raise BadRecord(
            where,
            f" is a string, not an object with the key {text_key}.",
            f"Remove {option} to read strings as documents.",
        )
    if not isinstance(record, dict):
        raise BadRecord(
            where,
            f" is a {type(record).__name__}, not an object.",
            "A .jsonl file must contain one JSON object per line.",
        )
    if text_key not in record:
        keys = ", ".join(record)
        way_out = for_texts(record) or "Choose the one with the text."
        raise BadRecord(where, f" has no key {text_key} ({option}). Available keys: {keys}.", way_out)
    if record[text_key] is None:
        return ""
    if not isinstance(record[text_key], str):
        kind = type(record[text_key]).__name__
        way_out = for_texts(record) or "Choose the key with the text."
        raise BadRecord(where, f": the value of {option} {text_key} must be a string, got {kind}.", way_out)
    return record[text_key]
