"""S3, and stores with its interface: conditional writes, and writes in parts that are cleaned up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from megalite.stores.errors import ConflictError
from megalite.stores.object_store import PIECE, ObjectStore

PARTS_AT_ONCE = 4
MOST_PARTS = 10_000
_DELETED_AT_ONCE = 1000


class S3Store(ObjectStore):
    """S3 through s3fs."""

    conditional = True

    def _place(self, url: str) -> dict[str, str]:
        bucket, key, _ = self.fs.split_path(self.path(url))
        return {"Bucket": bucket, "Key": key}

    def _run(self, action: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self.fs.loop, action, *args)

    def read(self, url: str, start: int = 0, end: int | None = None, tag: str | None = None) -> bytes:
        place, only = self._place(url), {} if tag is None else {"IfMatch": tag}
        if end is None:
            return bytes(self._run(self._body, place | only))
        requests = [
            place | only | {"Range": f"bytes={at}-{min(at + PIECE, end) - 1}"}
            for at in range(start, end, PIECE)
        ]
        try:
            return b"".join(self._run(self._bodies, requests))
        except OSError as error:
            if tag is not None and _failed(error) == "PreconditionFailed":
                raise ConflictError(f"{url} has been replaced since it was opened.") from None
            raise

    async def _body(self, request: dict[str, str]) -> bytes:
        answer = await self.fs._call_s3("get_object", **request)
        async with answer["Body"] as body:
            return bytes(await body.read())

    async def _bodies(self, requests: Sequence[dict[str, str]]) -> list[bytes]:
        return list(await asyncio.gather(*map(self._body, requests)))

    def write(self, url: str, data: bytes) -> None:
        self.fs.call_s3("put_object", **self._place(url), Body=data)

    def replace(self, url: str, data: bytes, known: str | None) -> str | None:
        only = {"IfNoneMatch": "*"} if known is None else {"IfMatch": known}
        try:
            return str(self.fs.call_s3("put_object", **self._place(url), Body=data, **only)["ETag"])
        except OSError as error:
            if _failed(error) in ("NotImplemented", "501"):
                self.conditional = False
                return None
            if _failed(error) not in ("PreconditionFailed", "NoSuchKey", "412", "404"):
                raise
        return self._replaced(url, data)

    def upload(self, file: Path, url: str, part_bytes: int) -> None:
        size = file.stat().st_size
        if size <= part_bytes:
            self.write(url, file.read_bytes())
        else:
            self._run(self._upload, file, size, self._place(url), max(part_bytes, -(-size // MOST_PARTS)))

    async def _upload(self, file: Path, size: int, place: dict[str, str], part_bytes: int) -> None:
        creation = await self.fs._call_s3("create_multipart_upload", **place)
        upload = {**place, "UploadId": creation["UploadId"]}
        gate = asyncio.Semaphore(PARTS_AT_ONCE)

        async def send(descriptor: int, number: int) -> dict[str, Any]:
            async with gate:
                data = os.pread(descriptor, part_bytes, number * part_bytes)
                part = await self.fs._call_s3("upload_part", **upload, PartNumber=number + 1, Body=data)
            return {"PartNumber": number + 1, "ETag": part["ETag"]}

        try:
            with open(file, "rb") as source:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(send(source.fileno(), number))
                        for number in range(-(-size // part_bytes))
                    ]
            parts = {"Parts": [task.result() for task in tasks]}
            await self.fs._call_s3("complete_multipart_upload", **upload, MultipartUpload=parts)
        except BaseExceptionGroup as group:
            await self._abort(upload)
            raise group.exceptions[0] from None
        except BaseException:
            await self._abort(upload)
            raise

    async def _abort(self, upload: dict[str, str]) -> None:
        try:
            await self.fs._call_s3("abort_multipart_upload", **upload)
        except Exception:  # it has been completed, or the next start aborts it
            return

    def delete(self, urls: Sequence[str]) -> None:
        places = [self._place(url) for url in urls]
        for first in range(0, len(places), _DELETED_AT_ONCE):
            some = places[first : first + _DELETED_AT_ONCE]
            answer = self.fs.call_s3(
                "delete_objects",
                Bucket=some[0]["Bucket"],
                Delete={"Objects": [{"Key": place["Key"]} for place in some], "Quiet": True},
            )
            if problems := answer.get("Errors"):
                raise OSError(f"{problems[0].get('Code')}: {problems[0].get('Key')} was not deleted")

    def abort_uploads(self, url: str) -> int:
        bucket, key, _ = self.fs.split_path(self.path(url))
        where: dict[str, str] = {"Bucket": bucket, "Prefix": f"{key}/"}
        aborted, position = 0, dict[str, str]()
        while True:
            answer = self.fs.call_s3("list_multipart_uploads", **where, **position)
            for each in answer.get("Uploads", ()):
                if each["Key"].startswith(f"{key}/"):
                    upload = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
                    self._run(self._abort, upload)
                    aborted += 1
            if not answer.get("IsTruncated"):
                return aborted
            position = {
                "KeyMarker": answer["NextKeyMarker"],
                "UploadIdMarker": answer["NextUploadIdMarker"],
            }


def _failed(error: BaseException) -> str:
    """Return the code of an error of S3, which is in what s3fs has translated."""
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(answer.get("Error", {}).get("Code", ""))
