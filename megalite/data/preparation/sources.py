"""Sources of documents: text files, .jsonl, .parquet and Hugging Face datasets, cut into tasks small enough to distribute over workers.

A document is a text or, for chat data, a whole record (then `text_key` is None, and records are sent as lines of JSON).

A task is plain data from which a worker makes documents; documents are in the order of the tasks, whichever worker runs them.
"""

import csv
import fnmatch
import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from megalite.data.indexed import DataError

TASK_BYTES = 1 << 18
TEXT_SUFFIXES = (
    *("", ".txt", ".text", ".md", ".rst", ".tex", ".log", ".html", ".htm", ".xml", ".css", ".json", ".yaml", ".yml"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt", ".scala", ".js", ".ts", ".tsx", ".go", ".rs", ".rb", ".php"),
    *(".swift", ".lua", ".r", ".jl", ".hs", ".ml", ".el", ".lisp", ".sql", ".sh", ".pl", ".toml", ".ini", ".cfg"),
)
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"} | dict.fromkeys(
    TEXT_SUFFIXES, "text"
)


@dataclass(frozen=True)
class Task:
    """About TASK_BYTES of input: whole files, lines of JSON, or texts. `size` is in bytes, for progress; `source` names their origin."""

    size: int
    files: tuple[Path, ...] = ()
    lines: tuple[bytes, ...] = ()
    texts: tuple[str, ...] = ()
    source: str = ""
    first_line: int = 1


class Source(Protocol):
    """One input. `size`: its approximate size in bytes."""

    size: int

    def tasks(self) -> Iterator[Task]: ...


class TextFiles:
    """Text files, one document each."""

    def __init__(self, paths: list[Path]):
        self._sizes = [(path, path.stat().st_size) for path in paths]
        self.size = sum(size for _, size in self._sizes)

    def tasks(self) -> Iterator[Task]:
        for chunk in _chunks(self._sizes, lambda item: item[1]):
            yield Task(sum(size for _, size in chunk), files=tuple(path for path, _ in chunk))


class JsonLines:
    """A file with one JSON object per line."""

    def __init__(self, path: Path):
        self._path, self.size = path, path.stat().st_size

    def tasks(self) -> Iterator[Task]:
        number = 1
        with self._path.open("rb") as file:
            for chunk in _chunks(file, len):
                yield Task(sum(map(len, chunk)), lines=tuple(chunk), source=f"{self._path} line", first_line=number)
                number += len(chunk)


class JsonArray:
    """A .json file that is one list of records, as Alpaca's and ShareGPT's. Raises DataError if it is not."""

    def __init__(self, path: Path):
        self._path, self.size = path, path.stat().st_size

    def tasks(self) -> Iterator[Task]:
        try:
            content = json.loads(self._path.read_bytes())
        except ValueError as error:
            raise DataError(f"--input {self._path} is not JSON ({error}). If it holds one object a line, add --format jsonl.") from None
        if not isinstance(content, list):
            raise DataError(f"--input {self._path} is not a list of records. If it holds one object a line, add --format jsonl.")
        yield from _record_tasks(content, f"{self._path} record")


class Csv:
    """A .csv or, with tabs, .tsv file, whose first row names the columns. Raises DataError if it has no such row."""

    def __init__(self, path: Path):
        self._path, self.size = path, path.stat().st_size

    def tasks(self) -> Iterator[Task]:
        yield from _record_tasks(self._rows(), f"{self._path} row")

    def _rows(self) -> Iterator[dict[str, str]]:
        """The rows as records; the first one after the header is row 1."""
        csv.field_size_limit(1 << 30)  # the default refuses texts of more than 128 KiB
        with self._path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.reader(file, delimiter="\t" if self._path.suffix.lower() == ".tsv" else ",")
            names = next(rows, [])
            if not names:
                raise DataError(f"--input {self._path} has no first row that names its columns. Add one, or --format text.")
            for number, row in enumerate(filter(None, rows), 1):
                if len(row) != len(names):
                    raise DataError(f"{self._path} row {number} has {len(row)} fields, and the first row names {len(names)}.")
                yield dict(zip(names, row, strict=True))


class Parquet:
    """A parquet file with its text in one column. Raises DataError if it cannot be read or has no such column."""

    def __init__(self, path: Path, text_key: str | None):
        import pyarrow
        from pyarrow import parquet

        try:
            self._file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"--input {path} is not a parquet file that pyarrow reads ({str(error).splitlines()[0]}).") from None
        schema = self._file.schema_arrow
        if text_key is not None:
            _check_column(schema.names, text_key, str(path))
            if (kind := schema.field(text_key).type) not in (pyarrow.string(), pyarrow.large_string()):
                raise DataError(f"--text_key {text_key} of {path} is {kind}, not text. Choose the column that holds text.")
        self._path, self._key = path, text_key
        columns = [column for column in range(self._file.metadata.num_columns) if text_key in (None, self._name(column))]
        groups = (self._file.metadata.row_group(i) for i in range(self._file.metadata.num_row_groups))
        self.size = sum(group.column(column).total_uncompressed_size for group in groups for column in columns)

    def _name(self, column: int) -> str:
        """The key of a record to which a stored column belongs."""
        return str(self._file.metadata.schema.column(column).path).split(".")[0]

    def tasks(self) -> Iterator[Task]:
        batches = self._file.iter_batches(batch_size=1024, columns=None if self._key is None else [self._key])
        if self._key is None:
            yield from _record_tasks((row for batch in batches for row in batch.to_pylist()), f"{self._path} row")
        else:
            yield from _text_tasks(text for batch in batches for text in batch.column(0).to_pylist())


class HuggingFace:
    """hf:NAME or hf:NAME:CONFIG, one split, through `datasets`. Raises DataError if it cannot be loaded or has no such column."""

    def __init__(self, name: str, split: str, text_key: str | None):
        import datasets

        datasets.disable_progress_bars()
        name, _, configuration = name.partition(":")
        try:
            self._rows = datasets.load_dataset(name, configuration or None, split=split)
        except Exception as error:  # `datasets` raises many types, for a missing name, split, configuration or network
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"--input hf:{name} with --split {split} can not be loaded: {reason}") from None
        if text_key is not None:
            _check_column(self._rows.column_names, text_key, f"hf:{name}")
        self._name, self._key, count = name, text_key, len(self._rows)
        sample = self._rows.select(range(0, count, max(1, count // 64)))
        sizes = [len((json.dumps(row, default=str) if text_key is None else row[text_key]) or "") for row in sample]
        self.size = sum(sizes) * count // max(1, len(sizes))

    def tasks(self) -> Iterator[Task]:
        if self._key is None:
            yield from _record_tasks(self._rows, f"hf:{self._name} row")
        else:
            yield from _text_tasks(row[self._key] for row in self._rows)


def open_inputs(names: list[str], *, exclude: list[str], file_format: str, text_key: str | None, split: str) -> list[Source]:
    """The sources named by `--input`, in order; a file named twice is read once. Raises DataError on a bad input.

    text_key: the key of a record's text; None for whole records.
    """
    paths = dict.fromkeys(item for name in names for item in _expand(name))
    kept = [p for p in paths if not any(fnmatch.fnmatch(p, pattern) for pattern in exclude)]
    if not kept:
        raise DataError(f"--exclude {' '.join(exclude)} leaves nothing of --input {' '.join(names)}.")
    sources: list[Source] = []
    for kind, group in groupby(kept, lambda p: _format(p, file_format, records=text_key is None)):
        if kind == "json":
            sources.extend(JsonArray(Path(p)) for p in group)
        elif kind == "text":
            sources.append(TextFiles([Path(p) for p in group]))
        elif kind == "jsonl":
            sources.extend(JsonLines(Path(p)) for p in group)
        elif kind == "csv":
            sources.extend(Csv(Path(p)) for p in group)
        elif kind == "parquet":
            sources.extend(Parquet(Path(p), text_key) for p in group)
        else:
            sources.extend(HuggingFace(p.removeprefix("hf:"), split, text_key) for p in group)
    return sources


def _expand(name: str) -> list[str]:
    """The files of a path or a glob (** crosses directories), sorted; hf:NAME is returned as it is."""
    if name.startswith("hf:") or Path(name).is_file():
        return [name]
    if Path(name).is_dir():
        raise DataError(f"--input {name} is a directory. Say which of its files, for example '{Path(name) / '**' / '*.txt'}'.")
    if not glob.has_magic(name):
        raise DataError(f"--input {name} does not exist. Give a file, a glob, or hf:NAME.")
    found = sorted(p for p in glob.glob(name, recursive=True) if Path(p).is_file())
    if not found:
        raise DataError(f"--input {name} matches no file. ** crosses directories, * does not.")
    return found


def _format(name: str, file_format: str, records: bool) -> str:
    if name.startswith("hf:"):
        return "hf"
    suffix = Path(name).suffix.lower()
    if file_format == "auto" and suffix not in FORMATS:
        raise DataError(f"--input {name}: the suffix {suffix} says nothing about its format. Add --format text, jsonl, csv or parquet.")
    kind = FORMATS[suffix] if file_format == "auto" else file_format
    if not records or kind != "text":
        return kind
    if suffix == ".json":
        return "json"
    raise DataError(
        f"--input {name} is text, and --chat reads conversations. Give .jsonl, .json, .csv, .parquet or hf:NAME, or add --format jsonl."
    )


def _check_column(names: list[str], text_key: str, where: str) -> None:
    if text_key not in names:
        raise DataError(f"--text_key {text_key} is not in {where}; its keys: {', '.join(names)}. Choose the one that holds the text.")


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
    number = 1
    for chunk in _chunks((json.dumps(row, default=str).encode() for row in rows), len):
        yield Task(sum(map(len, chunk)), lines=tuple(chunk), source=source, first_line=number)
        number += len(chunk)


def documents(task: Task, text_key: str) -> Iterator[tuple[str, bool]]:
    """A task's documents, and for each whether it had invalid Unicode, which is replaced by U+FFFD."""
    for path in task.files:
        yield _decoded(_read(path))
    for record, where, replaced in records(task):
        text, invalid = _valid(_text_of(record, where, text_key))
        yield text, replaced or invalid
    for text in task.texts:
        yield _valid(text)


def records(task: Task) -> Iterator[tuple[Any, str, bool]]:
    """The records of a task's lines, the place of each, and whether it had invalid UTF-8, which is replaced by U+FFFD."""
    for number, line in enumerate(task.lines, task.first_line):
        if line.strip():
            where = f"{task.source} {number}"
            decoded, replaced = _decoded(line)
            try:
                yield json.loads(decoded), where, replaced
            except ValueError as error:
                raise DataError(f"{where} is not JSON ({error}). A .jsonl file holds one JSON object a line.") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--input {path} can not be read: {error.strerror}.") from None


def _decoded(raw: bytes) -> tuple[str, bool]:
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def _valid(text: str) -> tuple[str, bool]:
    """The text and False; or, if it has lone surrogates, which JSON can spell but no encoding has, the text with U+FFFD and True."""
    try:
        text.encode()
        return text, False
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True


def _text_of(record: Any, where: str, text_key: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{where} is a {type(record).__name__}, not an object. A .jsonl file holds one JSON object a line.")
    _check_column(list(record), text_key, where)
    if not isinstance(record[text_key], str):
        kind = type(record[text_key]).__name__
        raise DataError(f"--text_key {text_key} of {where} is of type {kind}, not text. Choose the key that holds the text.")
    return record[text_key]
