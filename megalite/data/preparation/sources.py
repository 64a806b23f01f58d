"""Sources of documents: text files, .jsonl, .csv, .parquet and Hugging Face datasets, cut into tasks to
distribute over workers.

A document is a text or, for chat data, a whole record (then `text_key` is None, and records are sent as lines
of JSON). Documents are in the order of the tasks, whichever worker runs them. Text files and .jsonl are cut
by bytes, and the workers read them; one process decompresses a .jsonl or .csv that is compressed, and sends
its records.
"""

import csv
import fnmatch
import glob
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import count, groupby
from pathlib import Path
from typing import Any, Protocol

from megalite.data.chat.record_hints import for_texts
from megalite.data.chat.records import BadRecord
from megalite.data.indexed import DataError
from megalite.data.preparation.contents import (
    LOOKED_AT,
    PARQUET,
    SUFFIXES,
    Damage,
    compression,
    contents,
    is_parquet,
    not_text,
    opened,
    other_kind,
    other_kind_of,
    records_in,
    without_mark,
)
from megalite.data.preparation.tasks import ByteRange, Numbered, Task

TASK_BYTES = 1 << 18
# of a text that is cut; longer than a task, as the search for a cut takes some tokenizing
PIECE_BYTES = 4 * TASK_BYTES
LONG_TEXT = 4 * PIECE_BYTES  # a text file from this size on is cut
LONGEST_FIELD = 1 << 30  # characters of a .csv; the module's default refuses texts of more than 128 KiB
TEXT_SUFFIXES = (
    *("", ".txt", ".text", ".md", ".rst", ".tex", ".log", ".html", ".htm", ".xml", ".css", ".yaml", ".yml"),
    *(
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".java",
        ".kt",
        ".scala",
        ".js",
        ".ts",
        ".tsx",
        ".go",
        ".rs",
        ".rb",
        ".php",
    ),
    *(
        ".swift",
        ".lua",
        ".r",
        ".jl",
        ".hs",
        ".ml",
        ".el",
        ".lisp",
        ".sql",
        ".sh",
        ".pl",
        ".toml",
        ".ini",
        ".cfg",
    ),
)
FORMATS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
FORMATS |= dict.fromkeys(TEXT_SUFFIXES, "text")
UNSAID = ("", ".txt", ".text")
"""Suffixes of text, and of files that are called so because nothing else was said, such as the parts that
Spark writes."""


class InputSource(Protocol):
    """One input.

    Attributes:
        uses_text_key: it has records, and `--text_key` says which of their texts is read.
        size: its approximate size in bytes.
        identity: what changes if its content does.
    """

    uses_text_key: bool
    size: int
    identity: list[Any]

    def tasks(self) -> Iterator[Task]: ...


def _unusable(path: Path, size: int, lines: bool = False) -> Task | None:
    """The only task of a file that cannot be opened or is no text, which counts as one bad record; None if it
    can be read.

    lines: it holds records, each of which is checked: NUL bytes may be one bad line, as a crash of the
    machine that wrote it leaves them.
        If it is compressed, its beginning is not read, as what comes before any damage counts.
    """
    try:
        with opened(path) as (plain, file):
            start = b"" if lines and plain is not file else plain.read(LOOKED_AT)
    except Damage as error:
        return _unreadable(path, size, error)
    found = other_kind(start) if lines else not_text(start)
    return None if found is None else _only_bad(path, size, *found)


def _unreadable(path: Path, size: int, error: Damage) -> Task:
    return _only_bad(path, size, f"cannot be read: {error}")


def _only_bad(path: Path, size: int, reason: str, way_out: str = "") -> Task:
    """The task of a file that is one bad record."""
    return Task(size, damage=(BadRecord(f"--input {path}", f" {reason}.", way_out),))


def _damaged(path: Path, error: object) -> BadRecord:
    """What cannot be read of a file whose beginning could."""
    return BadRecord(f"--input {path}", f" is damaged, and the rest of it cannot be read ({error}).")


class TextFiles:
    """Text files, one document each."""

    uses_text_key = False

    def __init__(self, paths: list[Path]):
        self._sizes = [(path, path.stat().st_size) for path in paths]
        self.size = sum(size for _, size in self._sizes)
        self.identity = [_stamp(path) for path in paths]

    def tasks(self) -> Iterator[Task]:
        for long, group in groupby(self._sizes, lambda item: item[1] >= LONG_TEXT):
            if long:
                for path, size in group:
                    if problem := _unusable(path, size):
                        yield problem
                    elif compression(path):
                        yield Task(size, files=(path,))
                    else:
                        yield from (
                            Task(span.stop - span.start, piece=span)
                            for span in _spans(path, size, PIECE_BYTES)
                        )
            else:
                for chunk in _chunks(group, lambda item: item[1]):
                    yield Task(sum(size for _, size in chunk), files=tuple(path for path, _ in chunk))


class JsonLines:
    """A file with one JSON object per line."""

    uses_text_key = True

    def __init__(self, path: Path):
        self._path, self.size, self.identity = path, path.stat().st_size, [_stamp(path)]

    def tasks(self) -> Iterator[Task]:
        if problem := _unusable(self._path, self.size, lines=True):
            yield problem
        elif compression(self._path):
            yield from self._decompressed()
        else:
            yield from (
                Task(span.stop - span.start, span=span) for span in _spans(self._path, self.size, TASK_BYTES)
            )

    def _decompressed(self) -> Iterator[Task]:
        """The lines themselves, about TASK_BYTES of them; the size is that of the file's bytes that were read
        for them."""
        lines: list[tuple[int, bytes]] = []
        length = before = 0
        damage: tuple[BadRecord, ...] = ()
        try:
            with opened(self._path) as (plain, file):
                for number, line in enumerate(plain, 1):
                    if number == 1 and (found := other_kind(line)):
                        yield _only_bad(self._path, self.size, *found)
                        return
                    lines.append((number, line))
                    length += len(line)
                    if length >= TASK_BYTES:
                        at = file.tell()
                        yield Task(at - before, lines=tuple(lines), source=f"{self._path} line")
                        before, lines, length = at, [], 0
        except Damage as error:
            damage = (_damaged(self._path, error),)
        yield Task(self.size - before, lines=tuple(lines), source=f"{self._path} line", damage=damage)


class JsonDocument:
    """A file that is one list of records, as Alpaca's and ShareGPT's, or one record. If it is neither, its
    only task says so."""

    uses_text_key = True

    def __init__(self, path: Path):
        self._path, self.size, self.identity = path, path.stat().st_size, [_stamp(path)]

    def tasks(self) -> Iterator[Task]:
        way_out = "If it holds one object a line, add --format jsonl."
        try:
            raw = contents(self._path)
        except Damage as error:
            yield _unreadable(self._path, self.size, error)
            return
        if found := other_kind(raw):
            yield _only_bad(self._path, self.size, *found)
            return
        try:
            # Bytes that are not UTF-8 become lone surrogates, which are replaced and counted where the record
            # is read.
            content = json.loads(without_mark(raw).decode(errors="surrogateescape"))
        except (ValueError, RecursionError) as error:
            yield _only_bad(self._path, self.size, f"is not JSON ({error})", way_out)
            return
        if isinstance(content, dict) and content:
            content = [content]
        if isinstance(content, list):
            yield from _record_tasks(content, f"{self._path} record")
        else:
            yield _only_bad(self._path, self.size, "is not a list of records", way_out)


class Csv:
    """A .csv or, with tabs, .tsv file, whose first row names the columns. Raises DataError if it has no such
    row."""

    uses_text_key = True

    def __init__(self, path: Path):
        self._path, self.size, self.identity = path, path.stat().st_size, [_stamp(path)]

    def tasks(self) -> Iterator[Task]:
        if problem := _unusable(self._path, self.size):
            yield problem
        else:
            yield from _record_tasks(self._rows(), f"{self._path} row")

    def _rows(self) -> Iterator[dict[str, str] | BadRecord]:
        """The rows as records; the first one after the header is row 1."""
        csv.field_size_limit(LONGEST_FIELD)
        delimiter = "\t" if _suffix(self._path) == ".tsv" else ","
        try:
            with opened(self._path) as (plain, _):
                # surrogateescape: as in JsonDocument. strict: a quote without its end is an error, where it
                # would take all that follows into one field.
                file = io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline="")
                yield from self._read(csv.reader(file, delimiter=delimiter, strict=True))
        except Damage as error:
            yield _damaged(self._path, error)

    def _read(self, rows: Iterator[list[str]]) -> Iterator[dict[str, str] | BadRecord]:
        try:
            names = next(rows, [])
        except csv.Error as error:
            raise DataError(
                f"--input {self._path}: its first row, which names its columns, cannot be read ({error})."
            ) from None
        if not names:
            raise DataError(
                f"--input {self._path} has no first row that names its columns. Add one, or --format text."
            )
        for number in count(1):
            where = Numbered(f"{self._path} row", number)
            try:
                row = next(filter(None, rows), None)
            except csv.Error as error:
                yield BadRecord(where, f" cannot be read ({error}).")
                continue
            if row is None:
                return
            if len(row) == len(names):
                yield dict(zip(names, row, strict=True))
            else:
                yield BadRecord(where, f" has {len(row)} fields, and the first row names {len(names)}.")


class Parquet:
    """A parquet file with its text in one column. Raises DataError if it cannot be read or has no such
    column."""

    uses_text_key = True

    def __init__(self, path: Path, text_key: str | None):
        import pyarrow
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise DataError(
                f"--input {path} is not a parquet file that pyarrow reads "
                f"({reason}).{_instead_of_parquet(path)}"
            ) from None
        schema = self._file.schema_arrow
        if text_key is not None:
            _check_column(schema.names, text_key, str(path))
            kind = schema.field(text_key).type
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            # null: of a file whose texts are all null
            if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.null()):
                way_out = for_texts(dict.fromkeys(schema.names)) or "Choose the column that holds text."
                raise DataError(f"--text_key {text_key} of {path} is {kind}, not text. {way_out}")
        self._path, self._key, self.identity = path, text_key, [_stamp(path)]
        columns = [
            column
            for column in range(self._file.metadata.num_columns)
            if text_key in (None, self._name(column))
        ]
        groups = (self._file.metadata.row_group(i) for i in range(self._file.metadata.num_row_groups))
        self.size = sum(
            group.column(column).total_uncompressed_size for group in groups for column in columns
        )

    def _name(self, column: int) -> str:
        """The key of a record to which a stored column belongs."""
        return str(self._file.metadata.schema.column(column).path).split(".")[0]

    def tasks(self) -> Iterator[Task]:
        try:
            batches = self._file.iter_batches(
                batch_size=1024, columns=None if self._key is None else [self._key]
            )
            if self._key is None:
                yield from _record_tasks(
                    (row for batch in batches for row in batch.to_pylist()), f"{self._path} row"
                )
            else:
                yield from _text_tasks(text for batch in batches for text in batch.column(0).to_pylist())
        except (ValueError, OSError) as error:  # pyarrow's errors are one of the two
            yield Task(0, damage=(_damaged(self._path, str(error).splitlines()[0]),))


class HuggingFace:
    """hf:NAME or hf:NAME:CONFIG, one split, through `datasets`. Raises DataError if it cannot be loaded or
    has no such column."""

    uses_text_key = True

    def __init__(self, name: str, split: str, text_key: str | None):
        from megalite.families import hub

        name, _, configuration = name.partition(":")
        online = Path(name).exists() or hub.online()
        if not online:
            hub.stay_offline()
        import datasets

        datasets.disable_progress_bars()
        try:
            self._rows = datasets.load_dataset(name, configuration or None, split=split)
        except (
            Exception
        ) as error:  # `datasets` raises many types, for a missing name, split, configuration or network
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            download = f"hf download --repo-type dataset {name} --local-dir DIR"
            way_out = (
                ""
                if online
                else f". The Hub cannot be reached: run {download} where there is a network, and give hf:DIR"
            )
            raise DataError(
                f"--input hf:{name} with --split {split} cannot be loaded: {reason.rstrip('.')}{way_out}."
            ) from None
        if text_key is not None:
            _check_column(self._rows.column_names, text_key, f"hf:{name}")
            kind = getattr(self._rows.features[text_key], "dtype", "a list")
            if kind not in ("string", "large_string", "null"):
                raise DataError(
                    f"--text_key {text_key} of hf:{name} is {kind}, not text. Choose the column that holds "
                    "text."
                )
        self._name, self._key, count = name, text_key, len(self._rows)
        sample = self._rows.select(range(0, count, max(1, count // 64)))
        sizes = [
            len((json.dumps(row, default=str) if text_key is None else row[text_key]) or "") for row in sample
        ]
        self.size = sum(sizes) * count // max(1, len(sizes))
        self.identity = [
            name,
            configuration,
            split,
            count,
            sizes,
            [str(file["filename"]) for file in self._rows.cache_files],
        ]

    def tasks(self) -> Iterator[Task]:
        if self._key is None:
            yield from _record_tasks(self._rows, f"hf:{self._name} row")
        else:
            yield from _text_tasks(row[self._key] for row in self._rows)


class Damaged:
    """A file that cannot be opened as what it should be."""

    uses_text_key = True

    def __init__(self, path: Path, error: DataError):
        self._error, self.size, self.identity = str(error), 0, [_stamp(path)]

    def tasks(self) -> Iterator[Task]:
        yield Task(0, damage=(BadRecord(self._error, ""),))


def open_inputs(
    names: list[str],
    *,
    exclude: list[str],
    file_format: str,
    text_key: str | None,
    split: str,
    skip_bad: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> list[InputSource]:
    """The sources named by `--input`, in order; a file named twice is read once. Raises DataError on a bad
    input.

    Args:
        text_key: the key of a record's text; None for whole records.
        skip_bad: a damaged parquet file becomes a bad record.
        note: called with a line for the user if files of JSON are read as text.
    """
    paths = dict.fromkeys(item for name in names for item in _expand(name))
    kept = [p for p in paths if not any(fnmatch.fnmatch(p, pattern) for pattern in exclude)]
    if not kept:
        raise DataError(f"--exclude {' '.join(exclude)} leaves nothing of --input {' '.join(names)}.")
    of_file: dict[str, Callable[[Path], InputSource]] = {"json": JsonDocument, "jsonl": JsonLines, "csv": Csv}
    of_file["parquet"] = lambda path: _parquet(path, text_key, skip_bad)
    formats = {path: _format(path, file_format, text_key) for path in kept}
    sources: list[InputSource] = []
    for kind, group in groupby(kept, formats.__getitem__):
        if kind == "text":
            sources.append(TextFiles([Path(p) for p in group]))
        elif kind == "hf":
            sources.extend(HuggingFace(p.removeprefix("hf:"), split, text_key) for p in group)
        else:
            sources.extend(of_file[kind](Path(p)) for p in group)
    if file_format == "auto":
        as_text = [
            path for path, kind in formats.items() if kind == "text" and _suffix(Path(path)) == ".json"
        ]
        if as_text:
            more = f" and {len(as_text) - 1} more .json files hold" if len(as_text) > 1 else " holds"
            note(f"{as_text[0]}{more} no records with --text_key {text_key}: read as text, braces and all")
    return sources


def _instead_of_parquet(path: Path) -> str:
    """What a file is that should be parquet and is not, and a way out; empty if its beginning does not say
    so."""
    if (kind := compression(path)) is not None:
        return f" It is compressed by {kind}: decompress it, as parquet is compressed inside."
    if records_in(path) is not None:
        return " It holds JSON: name it .json."
    if (found := other_kind_of(path)) is None:
        return ""
    with path.open("rb") as file:
        begins = file.read(len(PARQUET)) == PARQUET
    return (
        " It begins as one, so the rest is missing or damaged: copy it again."
        if begins
        else f" It {found[0]}. {found[1]}"
    )


def _parquet(path: Path, text_key: str | None, skip_bad: bool) -> InputSource:
    try:
        return Parquet(path, text_key)
    except DataError as error:
        if not skip_bad:
            raise
        return Damaged(path, error)


def _stamp(path: Path) -> list[Any]:
    """A file's name, size and time of its last change."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def _expand(name: str) -> list[str]:
    """The files of a path or a glob (** crosses directories), sorted; hf:NAME is returned as it is."""
    if name.startswith("hf:") or Path(name).is_file():
        return [name]
    if Path(name).is_dir():
        raise DataError(
            f"--input {name} is a directory. Say which of its files, for example "
            f"'{Path(name) / '**' / '*.txt'}'."
        )
    if not glob.has_magic(name):
        raise DataError(f"--input {name} does not exist. Give a file, a glob, or hf:NAME.")
    found = sorted(p for p in glob.glob(name, recursive=True) if Path(p).is_file())
    if not found:
        raise DataError(f"--input {name} matches no file. ** crosses directories, * does not.")
    return found


def _suffix(path: Path) -> str:
    """The suffix that names the format, without the one of a compression."""
    return Path(path.stem if path.suffix.lower() in SUFFIXES else path.name).suffix.lower()


def _format(name: str, file_format: str, text_key: str | None) -> str:
    """The format of an input: what was asked for, else what its suffix says; which records of JSON it holds,
    its content says.

    Raises DataError if nothing says what it is, or if it is text where records are asked for (text_key None).
    """
    if name.startswith("hf:"):
        return "hf"
    path = Path(name)
    kind = FORMATS.get(_suffix(path)) if file_format == "auto" else file_format
    if file_format == "auto" and is_parquet(path):
        kind = "parquet"
    elif file_format == "auto" and (kind in (None, "csv", "parquet") or _suffix(path) in UNSAID):
        kind = _format_of_records(path, text_key, said=False) or kind
    elif kind == "json":
        kind = _format_of_records(path, text_key) or (
            "json" if text_key is None or other_kind_of(path) else "text"
        )
    elif kind == "jsonl":  # whose lines may, by mistake, be one list
        found = records_in(path)
        kind = "json" if found is not None and found.form in ("list", "one") else kind
    if kind is None:
        raise DataError(
            f"--input {name}: the suffix {_suffix(path)} says nothing about its format. Add --format text, "
            "jsonl, csv or parquet."
        )
    if kind == "text" and text_key is None:
        raise DataError(
            f"--input {name} is text, and --chat reads conversations. Give .jsonl, .json, .csv, .parquet or "
            "hf:NAME, or add --format jsonl."
        )
    return kind


def _format_of_records(path: Path, text_key: str | None, said: bool = True) -> str | None:
    """json or jsonl if a file holds such records; None if it is text, as a file of JSON is that belongs to a
    program.

    Several objects are records. One alone is a record if it has a text, and so are the objects of a file
    whose name does not say JSON. Strings are records where the name says JSON.

    said: the name says JSON.
    """
    found = records_in(path)
    if found is None or (found.strings and not said):  # a line of text may be in quotation marks
        return None
    is_text = text_key is not None and text_key not in found.keys
    if (
        is_text
        and not (said and found.several and found.form in ("lines", "list"))
        or not (said or found.several)
    ):
        return None
    if found.form == "apart":
        way_out = f"Put each on one line: jq -c . {path}"
        raise DataError(
            f"--input {path} holds objects of JSON that are neither one a line nor in a list. {way_out}."
        )
    return "jsonl" if found.form == "lines" else "json"


def _check_column(names: list[str], text_key: str, where: str) -> None:
    if text_key not in names:
        way_out = for_texts(dict.fromkeys(names)) or "Choose the one that holds the text."
        raise DataError(f"--text_key {text_key} is not in {where}; its keys: {', '.join(names)}. {way_out}")


def _spans(path: Path, size: int, step: int) -> Iterator[ByteRange]:
    return (ByteRange(path, start, min(start + step, size)) for start in range(0, size, step))


def _chunks(items: Iterable[Any], size: Any) -> Iterator[list[Any]]:
    """Items in lists of about TASK_BYTES each."""
    chunk, total = [], 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if total >= TASK_BYTES:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _text_tasks(texts: Iterable[str | None]) -> Iterator[Task]:
    for chunk in _chunks((text or "" for text in texts), len):
        yield Task(sum(map(len, chunk)), texts=tuple(chunk))


def _record_tasks(rows: Iterable[Any], source: str) -> Iterator[Task]:
    """Tasks of records, numbered from 1; a BadRecord among them takes the place of one that cannot be
    read."""
    numbered = enumerate(
        (row if isinstance(row, BadRecord) else json.dumps(row, default=str).encode() for row in rows), 1
    )
    for chunk in _chunks(numbered, lambda item: 0 if isinstance(item[1], BadRecord) else len(item[1])):
        lines = tuple((number, line) for number, line in chunk if isinstance(line, bytes))
        damage = tuple(line for _, line in chunk if isinstance(line, BadRecord))
        yield Task(sum(len(line) for _, line in lines), lines=lines, source=source, damage=damage)
