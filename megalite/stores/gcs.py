"""Google Cloud Storage: writes on the condition that an object still has the generation that is known."""

from __future__ import annotations

import json
import uuid
from urllib.parse import quote

from megalite.stores.object_store import ObjectStore


class GcsStore(ObjectStore):
    """Google Cloud Storage through gcsfs."""

    conditional = True

    def replace(self, url: str, data: bytes, known: str | None) -> str | None:
        bucket, key, _ = self.fs.split_path(self.path(url))
        boundary = uuid.uuid4().hex
        parts = (
            ("application/json; charset=UTF-8", json.dumps({"name": key}).encode()),
            ("application/octet-stream", data),
        )
        body = b"".join(
            f"--{boundary}\r\nContent-Type: {kind}\r\n\r\n".encode() + part + b"\r\n" for kind, part in parts
        )
        try:
            answer = self.fs.call(
                "POST",
                f"{self.fs._location}/upload/storage/v1/b/{quote(bucket)}/o",
                uploadType="multipart",
                ifGenerationMatch=known or "0",  # 0: there is no object
                headers={"Content-Type": f"multipart/related; boundary={boundary}"},
                data=body + f"--{boundary}--".encode(),
                json_out=True,
            )
        except (FileExistsError, FileNotFoundError):  # another generation, or none any more
            return self._replaced(url, data)
        return str(answer["generation"])
