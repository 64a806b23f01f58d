"""Detection of compression, text and JSON records from the content of a file, not its name."""

from __future__ import annotations

import codecs
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megalite.data.chat.record_hints import TEXT_KEY

MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""Compression by the first bytes of a file."""
SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
PARQUET = b"PAR1"
OTHERS = {
    b"%PDF-": "a PDF",
    PARQUET: "a parquet file",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x9d": "a file compressed with compress",
}
OTHERS |= {
    magic: f"a file compressed with {name}" for magic, name in MAGIC.items()
}  # within a compressed file
GIT_LFS = b"version https://git-lfs.github.com/spec/"
# one of UTF-32's begins with the first, the other one has NUL bytes
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LOOKED_AT = 8192  # bytes that are searched for NUL, as git and grep do
LINES = 10  # that are searched for a record, if the first ones are damaged
LONGEST = 1 << 26  # bytes of a record that is looked for
BEGINNING = 1 << 20  # bytes in which the first record of a list is looked for
STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"\s*', re.DOTALL)
STRINGS = re.compile(
    rf'\[\s*(?=")(?:{STRING.pattern},\s*)*+(?:{STRING.pattern}(?:\]\s*)?|"(?:[^"\\]++|\\.)*+\\?)?', re.DOTALL
)
"""A list of strings in JSON, or its beginning."""


UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of reading and decompressing a file; those of pyarrow are among them."""


class Damage(Exception):
    """Raised if a file cannot be read or decompressed, with the reason."""


def compression(path: Path) -> str | None:
    """Return the compression of a file, or None.

    Raises OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        return compression_of(file.read(6))


def compression_of(start: bytes) -> str | None:
    """Return the compression of a file that begins with these bytes, or None."""
    # a frame to skip, with which pzstd begins
    if len(start) > 3 and start[0] & 0xF0 == 0x50 and start[1:4] == b"\x2a\x4d\x18":
        return "zstd"
    return next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file and yield its decompressed stream and the file itself, whose position shows the progress.

    Raises Damage, here or where the bytes are read, if they cannot be read or decompressed.
    """
    try:
        kind = compression(path)
        with path.open("rb") as file, decompressed(file, kind) as plain:
            yield plain, file
    except UNREADABLE as error:
        raise Damage(reason_of(error)) from None


def reason_of(error: BaseException) -> str:
    """Return the reason of an error of reading, without its type."""
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[
        0
    ].rstrip(".")


def decompressed(file: BinaryIO, kind: str | None) -> BinaryIO:
    """Return the plain stream of a file, which is the file itself if it is not compressed."""
    if kind == "gzip":
        import gzip

        return cast(BinaryIO, gzip.open(file))
    if kind == "bz2":
        import bz2

        return cast(BinaryIO, bz2.open(file))
    if kind == "xz":
        return cast(BinaryIO, lzma.open(file))
    if kind == "zstd":
        import io

        try:
            import pyarrow
        except ImportError:
            raise OSError(
                "reading zstd files requires pyarrow. Install it with `pip install 'megalite[data]'`"
            ) from None
        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    return file


def contents(path: Path) -> bytes:
    """Read a file and decompress it. Raises Damage if it cannot be read."""
    with opened(path) as (plain, _):
        return plain.read()


def is_parquet(path: Path) -> bool:
    """Return whether a file starts and ends like a parquet file. Text may start with the same letters."""
    try:
        with path.open("rb") as file:
            start = file.read(len(PARQUET))
            file.seek(-len(PARQUET), os.SEEK_END)
            return start == file.read() == PARQUET
    except OSError:
        return False


def without_mark(raw: bytes) -> bytes:
    """Remove a UTF-8 byte-order mark."""
    return raw.removeprefix(codecs.BOM_UTF8)


def other_kind(raw: bytes) -> tuple[str, str] | None:
    """Return the problem and a way out if the first bytes of a file show that it is not UTF-8 text.

    Text in encodings other than UTF-16 is text, whose bytes are replaced where they are not UTF-8.
    """
    if raw.startswith(UTF_16):
        return (
            "is encoded in UTF-16 or UTF-32, but UTF-8 is required",
            "Convert it with `iconv -f UTF-16 -t UTF-8`.",
        )
    if raw.startswith(GIT_LFS):
        return "is a Git LFS pointer, not the file itself", "Run `git lfs pull` in the clone."
    if (kind := next((name for magic, name in OTHERS.items() if raw.startswith(magic)), None)) is not None:
        way_out = "Add --format parquet" if raw.startswith(PARQUET) else "Extract the text first"
        return f"is {kind}, not text", f"{way_out}, or skip the file with --exclude."
    return None


def other_kind_of(path: Path) -> tuple[str, str] | None:
    """Return `other_kind` of a file's content, or None if it cannot be read."""
    try:
        with opened(path) as (plain, _):
            return other_kind(plain.read(LOOKED_AT))
    except Damage:
        return None


def not_text(raw: bytes) -> tuple[str, str] | None:
    """Return `other_kind`, which also detects files with NUL bytes at their beginning."""
    if (kind := other_kind(raw)) is not None:
        return kind
    if b"\0" in raw[:LOOKED_AT]:
        return "contains NUL bytes and seems to be a binary file", "Skip it with --exclude."
    return None


# ---- records of JSON


class Records(NamedTuple):
    """Layout of the records in a file.

    Attributes:
        form: one record per line, a list of records, or one object over several lines; apart: objects in
            neither form.
        keys: keys of the first record, or TEXT_KEY alone if the records are strings.
        several: whether there is more than one record.
        strings: whether the records are strings instead of objects.
    """

    form: Literal["lines", "list", "one", "apart"]
    keys: frozenset[str]
    several: bool
    strings: bool = False


def records_in(path: Path) -> Records | None:
    """Return the layout of the JSON records in a file, or None if it has none or cannot be read."""
    try:
        with opened(path) as (plain, _):
            return _records(plain)
    except Damage:
        return None


def _records(plain: BinaryIO) -> Records | None:
    first = without_mark(plain.readline(LONGEST))
    while first and not first.strip():
        first = plain.readline(LONGEST)
    first = first.lstrip()
    if first.startswith(b"["):
        text = (first + plain.read(BEGINNING)).decode(errors="replace")
        if STRINGS.fullmatch(text):
            return Records("list", frozenset({TEXT_KEY}), True, strings=True)
        begins = re.match(r"\[\s*(?=\{)", text)
        return (
            Records("list", frozenset(_leading_object(text[begins.end() :]) or ()), True) if begins else None
        )
    if STRING.fullmatch(first.decode(errors="replace")):
        return Records("lines", frozenset({TEXT_KEY}), True, strings=True)
    if not first.startswith(b"{"):
        return None
    if (record := _object(first)) is not None:
        return Records(
            "lines",
            frozenset(record),
            any(line.strip() for line in iter(lambda: plain.readline(BEGINNING), b"")),
        )
    rest = plain.read(LONGEST)
    if (record := _object(first + rest)) is not None:
        return Records("one", frozenset(record), False)
    for line in islice(rest[:BEGINNING].splitlines(), LINES):
        if (record := _object(line)) is not None:
            return Records("lines", frozenset(record), True)  # the first one is damaged
    record = _leading_object((first + rest[:BEGINNING]).decode(errors="replace"))
    return None if record is None else Records("apart", frozenset(record), True)


def _object(raw: bytes) -> dict[str, Any] | None:
    """Parse a non-empty object, or return None for anything else."""
    try:
        value = json.loads(raw.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None


def _leading_object(text: str) -> dict[str, Any] | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None
