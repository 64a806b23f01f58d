"""Names of objects in a store: s3://bucket/prefix/name.

A store has no directories; a name with slashes is used like a path. `pathlib` folds the two slashes of a URL,
so both spellings are accepted.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
    **dict.fromkeys(("memory", "file"), "fsspec"),
}
"""The protocols of stores, and the packages that implement them."""
_URL = re.compile(rf"({'|'.join(PACKAGES)}):/+(.*)")


def is_url(text: str | Path) -> bool:
    """Return whether a path is the URL of a store."""
    return _URL.match(str(text)) is not None


def normal(text: str | Path) -> str:
    """Return a URL with two slashes after the protocol, an absolute path for `file`, and none at its end."""
    match = _URL.match(str(text))
    assert match is not None, text
    protocol, path = match[1], re.sub(r"/{2,}", "/", match[2]).strip("/")
    return f"{protocol}://{'/' if protocol == 'file' else ''}{path}"


def protocol_of(url: str | Path) -> str:
    return normal(url).partition(":")[0]


def local(root: str | Path, url: str | Path) -> Path:
    """Return the local directory that stands for a URL below a directory."""
    protocol, _, path = normal(url).partition("://")
    return Path(root, protocol, *path.strip("/").split("/"))


def cache_directory() -> Path:
    """Return the directory of local copies, MEGALITE_CACHE or ~/.cache/megalite. The ranks of a node share
    it.
    """
    return Path(os.environ.get("MEGALITE_CACHE") or Path.home() / ".cache" / "megalite")
