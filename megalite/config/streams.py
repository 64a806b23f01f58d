"""Streams: data whose documents are tokenized while a run trains. Imports no torch.

data.train and data.validation name a stream as FORMAT:PATH. PATH is a file, a glob or a range in braces, or a
directory of MDS; with a scheme such as s3:// it is opened by fsspec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.config.extensions import BUILT_IN

if TYPE_CHECKING:
    from megalite.config.sections.data import DataConfig

FORMATS = ("jsonl", "parquet", "webdataset", "mds")
BUILT_IN["data source"] = FORMATS
ENDLESS = 1 << 62
"""Number of samples of an epoch of a stream, which is not known before its end."""


def format_of(source: Any) -> str | None:
    """Return the format of a stream, or None for a token file or a data source of the user."""
    name, colon, path = source.partition(":") if isinstance(source, str) else ("", "", "")
    return name if colon and path and name in FORMATS else None


def is_stream(source: Any) -> bool:
    """Return whether one name in data.train or data.validation is a stream."""
    return format_of(source) is not None


def names_in(source: Any) -> list[str]:
    """Return all names in a value of data.train or data.validation, of streams and of other data."""
    if isinstance(source, str):
        return [source]
    if isinstance(source, dict):
        named = bool(source) and all(isinstance(each, str) for each in source.values())
        return list(source.values()) if named else list(source)
    return list(source) if isinstance(source, list) else []


def streams_in(source: Any) -> list[str]:
    """Return the streams in a value of data.train or data.validation."""
    return [name for name in names_in(source) if is_stream(name)]


def has_streams(data: DataConfig) -> bool:
    """Return whether training or validation data has a stream, or training data is rewritten as one."""
    return bool(data.fim_rate or streams_in(data.train) or streams_in(data.validation))
