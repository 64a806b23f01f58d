"""unsteady://, a remote file system of fsspec whose files are those of memory://, and which fails when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class ConnectionLost(Exception):
    """An error of a client's library, which is no OSError."""


class UnsteadyFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.before("read")
        return bytes(self.fs.memory.cat_file(self.path, start, end))


class UnsteadyFileSystem(AbstractFileSystem):
    """Attributes:
    before: called with what is asked (info, list, cat or read) and raises what that access raises.
    """

    protocol = "unsteady"
    before: Callable[[str], None] = staticmethod(lambda access: None)
    memory = fsspec.filesystem("memory")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return f"/{path.removeprefix('unsteady://').strip('/')}"

    def info(self, path: str, **options: Any) -> Any:
        self.before("info")
        return self.memory.info(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.before("list")
        return self.memory.ls(path, detail)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        self.before("cat")
        return self.memory.cat_file(path, start, end)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return UnsteadyFile(self, path, mode, block_size=64, cache_type="readahead")


fsspec.register_implementation("unsteady", UnsteadyFileSystem, clobber=True)
