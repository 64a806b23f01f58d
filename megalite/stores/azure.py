"""Azure Blob Storage: writes on the condition that an object still has the ETag that is known."""

from __future__ import annotations

from typing import Any

from megalite.stores.object_store import ObjectStore


class AzureStore(ObjectStore):
    """Azure Blob Storage through adlfs."""

    conditional = True

    def replace(self, url: str, data: bytes, known: str | None) -> str | None:
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceExistsError, ResourceModifiedError, ResourceNotFoundError
        from fsspec.asyn import sync

        container, name, _ = self.fs.split_path(self.path(url))
        only: dict[str, Any] = {"overwrite": False}
        if known is not None:
            only = {"overwrite": True, "etag": known, "match_condition": MatchConditions.IfNotModified}

        async def write() -> Any:
            async with self.fs.service_client.get_blob_client(container, name) as client:
                return await client.upload_blob(data, **only)

        try:
            return str(sync(self.fs.loop, write)["etag"])
        except (ResourceExistsError, ResourceModifiedError, ResourceNotFoundError):
            return self._replaced(url, data)
