"""Shards of WebDataset: tar files, in which the members of a sample have one name and several endings.

A sample is the consecutive members with the same path up to the first dot of the file name. Its text is the
member whose ending is data.text_key; else the value at data.text_key in its .json member; else its .txt
member.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any, Self

from megalite.data.preparation.contents import Damage
from megalite.data.preparation.tasks import decoded
from megalite.data.streams.jsonl import parsed_text
from megalite.data.streams.shard import StreamRecord, opened


class _CheckedMember(tarfile.TarInfo):
    """A member of an archive that ends only with its end marker: tarfile takes any broken header for it."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # it is in no stub
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from None


class TarShard:
    """A .tar file, which may be compressed."""

    noun, first = "sample", 1

    def __init__(self, path: str, identity: list[Any], text_key: str):
        self.path, self.identity, self._key = path, identity, text_key

    def records(self, row: int = 0, offset: int = 0) -> Iterator[StreamRecord]:
        number, key, start = row, None, offset
        members: dict[str, bytes] = {}
        for at, name, content in self._members(row, offset):
            folder, slash, file = name.rpartition("/")
            stem, _, ending = file.partition(".")
            if (new := folder + slash + stem) != key:
                if members:
                    yield self._record(number, start, str(key), members)
                    number += 1
                key, start, members = new, at, {}
            if content is not None:
                members[ending.lower()] = content
        if members:
            yield self._record(number, start, str(key), members)

    def _members(self, row: int, offset: int) -> Iterator[tuple[int, str, bytes | None]]:
        """Yield the files of the archive from a byte on: the byte at which each begins, its name and content.

        Members with neither text nor JSON have no content, which is not read.
        """
        with opened(self.path) as (stream, seekable):
            skipped = 0
            if seekable:
                stream.seek(offset)
            else:
                while skipped < offset and (piece := stream.read(min(offset - skipped, 1 << 20))):
                    skipped += len(piece)
            try:
                with tarfile.open(fileobj=stream, mode="r|", tarinfo=_CheckedMember) as archive:
                    while (member := archive.next()) is not None:
                        archive.members = []  # type: ignore[attr-defined]  # it keeps a record of each
                        if not member.isfile():
                            continue
                        ending = member.name.rpartition("/")[2].partition(".")[2].lower()
                        wanted = ending in (self._key.lower(), "json", "txt")
                        file = archive.extractfile(member) if wanted else None
                        yield offset + member.offset, member.name, file.read() if file else None
            except tarfile.TarError as error:
                raise Damage(f"is not a whole tar archive ({error})") from None

    def _record(self, row: int, offset: int, name: str, members: dict[str, bytes]) -> StreamRecord:
        if self._key.lower() in members and self._key != "json":
            return StreamRecord(row, offset, decoded(members[self._key.lower()])[0])
        if "json" in members:
            record = parsed_text(row, offset, members["json"], self._key)
            if not record.problem or "txt" not in members:
                return record._replace(problem=record.problem and f" ({name}.json){record.problem}")
        if "txt" in members:
            return StreamRecord(row, offset, decoded(members["txt"])[0])
        endings = ", ".join(f".{ending}" for ending in members) or "none with text"
        return StreamRecord(
            row, offset, problem=f" ({name}) has no member .{self._key}, .json or .txt: {endings}"
        )
