"""Input sources: text files, .jsonl, .csv, .parquet and Hugging Face datasets, split into tasks for workers.

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
"""Suffixes of text files, and of files with an arbitrary suffix, such as part files of Spark."""


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
    """Return a task with one bad record if a file cannot be opened or is not text, or None if it can be read.

    Args:
        lines: it holds records, each of which is checked: NUL bytes may be one bad line, as a crash of the
            machine that wrote it leaves them. If it is compressed, its beginning is not read, as what comes
            before any damage counts.
    """
    try:
        with opened(path) as (plain, file):
            start = b"" if lines and plain is not file else plain.read(LOOKED_AT)
    except Damage as error:
        return _unreadable(path, size, error)
    problem = other_kind(start) if lines else not_text(start)
    return None if problem is None else _only_bad(path, size, *problem)


def _unreadable(path: Path, size: int, error: Damage) -> Task:
    return _only_bad(path, size, f"could not be read: {error}")


def _only_bad(path: Path, size: int, reason: str, way_out: str = "") -> Task:
    """Return a task with a single bad record."""
    return Task(size, damage=(BadRecord(f"--input {path}", f" {reason}.", way_out),))


def _damaged(path: Path, error: object) -> BadRecord:
    """Return the bad record for the unreadable rest of a file."""
    return BadRecord(f"--input {path}", f" is damaged and could only be read in part ({error}).")


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

    @property
    def compressed(self) -> bool:
        """Whether one process must read it from its beginning."""
        try:
            return compression(self._path) is not None
        except OSError:  # reported when it is read
            return False

    def tasks(self) -> Iterator[Task]:
        if problem := _unusable(self._path, self.size, lines=True):
            yield problem
        elif self.compressed:
            yield from self._decompressed()
        else:
            yield from (
                Task(span.stop - span.start, span=span) for span in _spans(self._path, self.size, TASK_BYTES)
            )

    def _decompressed(self) -> Iterator[Task]:
        """Yield tasks with about TASK_BYTES of lines.

        The size of a task is the number of compressed bytes read for it.
        """
        lines: list[tuple[int, bytes]] = []
        length = before = 0
        damage: tuple[BadRecord, ...] = ()
        try:
            with opened(self._path) as (plain, file):
                for number, line in enumerate(plain, 1):
                    if number == 1 and (problem := other_kind(line)):
                        yield _only_bad(self._path, self.size, *problem)
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
    """A JSON file with a list of records, as in Alpaca and ShareGPT data, or a single record.

    If it is neither, its only task is an error.
    """

    uses_text_key = True

    def __init__(self, path: Path):
        self._path, self.size, self.identity = path, path.stat().st_size, [_stamp(path)]

    def tasks(self) -> Iterator[Task]:
        way_out = "If it contains one JSON object per line, add --format jsonl."
        try:
            raw = contents(self._path)
        except Damage as error:
            yield _unreadable(self._path, self.size, error)
            return
        if problem := other_kind(raw):
            yield _only_bad(self._path, self.size, *problem)
            return
        try:
            # Bytes that are not UTF-8 become lone surrogates, which are replaced and counted where the record
            # is read.
            content = json.loads(without_mark(raw).decode(errors="surrogateescape"))
        except (ValueError, RecursionError) as error:
            yield _only_bad(self._path, self.size, f"is not valid JSON ({error})", way_out)
            return
        if isinstance(content, dict) and content:
            content = [content]
        if isinstance(content, list):
            yield from _record_tasks(content, f"{self._path} record")
        else:
            yield _only_bad(self._path, self.size, "is not a list of records", way_out)


class Csv:
    """A .csv or, with tabs, .tsv file with a header row.

    Raises DataError if it has no header row.
    """

    uses_text_key = True

    def __init__(self, path: Path):
        self._path, self.size, self.identity = path, path.stat().st_size, [_stamp(path)]

    def tasks(self) -> Iterator[Task]:
        if problem := _unusable(self._path, self.size):
            yield problem
        else:
            yield from _record_tasks(self._rows(), f"{self._path} row")

    def _rows(self) -> Iterator[dict[str, str] | BadRecord]:
        """Yield the rows as records. The first row after the header is row 1."""
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
            raise DataError(f"Could not read the header row of --input {self._path}: {error}.") from None
        if not names:
            raise DataError(f"--input {self._path} has no header row. Add one, or pass --format text.")
        for number in count(1):
            where = Numbered(f"{self._path} row", number)
            try:
                row = next(filter(None, rows), None)
            except csv.Error as error:
                yield BadRecord(where, f" could not be parsed ({error}).")
                continue
            if row is None:
                return
            if len(row) == len(names):
                yield dict(zip(names, row, strict=True))
            else:
                yield BadRecord(where, f" has {len(row)} fields, but the header has {len(names)}.")


class Parquet:
    """A parquet file with its text in one column.

    Raises DataError if it cannot be read or has no such column.
    """

    uses_text_key = True

    def __init__(self, path: Path, text_key: str | None):
        import pyarrow
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise DataError(
                f"Could not read --input {path} as parquet: {reason}.{_instead_of_parquet(path)}"
            ) from None
        schema = self._file.schema_arrow
        if text_key is not None:
            _check_column(schema.names, text_key, str(path))
            kind = schema.field(text_key).type
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            # null: of a file whose texts are all null
            if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.null()):
                way_out = for_texts(dict.fromkeys(schema.names)) or "Choose a column with text."
                raise DataError(
                    f"--text_key {text_key} refers to a column of type {kind} in {path}. {way_out}"
                )
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
        """Return the key of a record that a stored column belongs to."""
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
    """hf:NAME or hf:NAME:CONFIG, one split, through `datasets`.

    Raises DataError if it cannot be loaded or has no such column.
    """

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
                else f". The Hugging Face Hub is not reachable. Run `{download}` on a machine with network "
                "access and pass hf:DIR"
            )
            raise DataError(
                f"Could not load split {split} of --input hf:{name}: {reason.rstrip('.')}{way_out}."
            ) from None
        if text_key is not None:
            _check_column(self._rows.column_names, text_key, f"hf:{name}")
            kind = getattr(self._rows.features[text_key], "dtype", "a list")
            if kind not in ("string", "large_string", "null"):
                raise DataError(
                    f"--text_key {text_key} of hf:{name} is {kind}, not text. Choose a column with text."
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
    """A file that could not be opened in its format."""

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
    """Open the sources of `--input`, in order. A file that is listed twice is read once.

    Args:
        text_key: the key of a record's text; None for whole records.
        skip_bad: a damaged parquet file becomes a bad record.
        note: called with a line for the user if files of JSON are read as text.

    Raises:
        DataError: on bad input.
    """
    paths = dict.fromkeys(item for name in names for item in _expand(name))
    kept = [p for p in paths if not any(fnmatch.fnmatch(p, pattern) for pattern in exclude)]
    if not kept:
        raise DataError(f"--exclude {' '.join(exclude)} excludes all files of --input {' '.join(names)}.")
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
            more = f" and {len(as_text) - 1} more .json files have" if len(as_text) > 1 else " has"
            note(
                f"{as_text[0]}{more} no records with --text_key {text_key}; reading the whole file as plain "
                "text"
            )
    return sources


def _instead_of_parquet(path: Path) -> str:
    """Return a hint on the actual format of a file that is not valid parquet, or an empty string."""
    if (method := compression(path)) is not None:
        return (
            f" It is compressed with {method}. Decompress it first; parquet files are compressed internally."
        )
    if records_in(path) is not None:
        return " It contains JSON. Rename it to .json."
    if (problem := other_kind_of(path)) is None:
        return ""
    with path.open("rb") as file:
        begins = file.read(len(PARQUET)) == PARQUET
    if begins:
        return " It starts like a parquet file, so it is truncated or damaged. Copy it again."
    return f" It {problem[0]}. {problem[1]}"


def _parquet(path: Path, text_key: str | None, skip_bad: bool) -> InputSource:
    try:
        return Parquet(path, text_key)
    except DataError as error:
        if not skip_bad:
            raise
        return Damaged(path, error)


def _stamp(path: Path) -> list[Any]:
    """Return a file's name, size and time of its last change."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def _expand(name: str) -> list[str]:
    """Return the sorted files of a path or a glob, in which ** crosses directories.

    hf:NAME is returned unchanged.
    """
    if name.startswith("hf:") or Path(name).is_file():
        return [name]
    if Path(name).is_dir():
        raise DataError(
            f"--input {name} is a directory. Select its files with a glob, for example "
            f"'{Path(name) / '**' / '*.txt'}'."
        )
    if not glob.has_magic(name):
        raise DataError(f"--input {name} does not exist. Expected a file, a glob, or hf:NAME.")
    files = sorted(p for p in glob.glob(name, recursive=True) if Path(p).is_file())
    if not files:
        raise DataError(f"No files match --input {name}. Use ** to match files in subdirectories.")
    return files


def _suffix(path: Path) -> str:
    """Return the suffix of the format, without the suffix of a compression."""
    return Path(path.stem if path.suffix.lower() in SUFFIXES else path.name).suffix.lower()


def _format(name: str, file_format: str, text_key: str | None) -> str:
    """Return the format of an input from the option, its suffix or its content.

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
        records = records_in(path)
        kind = "json" if records is not None and records.form in ("list", "one") else kind
    if kind is None:
        raise DataError(
            f"Could not determine the format of --input {name} from its suffix {_suffix(path)!r}. Pass "
            "--format text, jsonl, csv or parquet."
        )
    if kind == "text" and text_key is None:
        raise DataError(
            f"--input {name} is a text file, but --chat and --preference require records. Use .jsonl, .json, "
            ".csv, .parquet or hf:NAME, or add --format jsonl."
        )
    return kind


def _format_of_records(path: Path, text_key: str | None, said: bool = True) -> str | None:
    """Return json or jsonl if a file contains records, or None if it is read as text.

    Several objects are records. One alone is a record if it has a text, and so are the objects of a file
    whose name does not say JSON. Strings are records where the name says JSON.

    Args:
        said: the name says JSON.
    """
    records = records_in(path)
    if records is None or (records.strings and not said):  # a line of text may be in quotation marks
        return None
    is_text = text_key is not None and text_key not in records.keys
    if (
        is_text
        and not (said and records.several and records.form in ("lines", "list"))
        or not (said or records.several)
    ):
        return None
    if records.form == "apart":
        way_out = f"Convert it to one object per line with `jq -c . {path}`"
        raise DataError(
            f"--input {path} contains JSON objects that are neither one per line nor in a list. {way_out}."
        )
    return "jsonl" if records.form == "lines" else "json"


def _check_column(names: list[str], text_key: str, where: str) -> None:
    if text_key not in names:
        way_out = for_texts(dict.fromkeys(names)) or "Choose the one with the text."
        raise DataError(
            f"--text_key {text_key} not found in {where}. Available keys: {', '.join(names)}. {way_out}"
        )


def _spans(path: Path, size: int, step: int) -> Iterator[ByteRange]:
    return (ByteRange(path, start, min(start + step, size)) for start in range(0, size, step))


def _chunks(items: Iterable[Any], size: Any) -> Iterator[list[Any]]:
    """Yield lists of items with about TASK_BYTES each."""
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
    """Yield tasks of records, which are numbered from 1.

    A BadRecord takes the place of a record that could not be read.
    """
    numbered = enumerate(
        (row if isinstance(row, BadRecord) else json.dumps(row, default=str).encode() for row in rows), 1
    )
    for chunk in _chunks(numbered, lambda item: 0 if isinstance(item[1], BadRecord) else len(item[1])):
        lines = tuple((number, line) for number, line in chunk if isinstance(line, bytes))
        damage = tuple(line for _, line in chunk if isinstance(line, BadRecord))
        yield Task(sum(len(line) for _, line in lines), lines=lines, source=source, damage=damage)
