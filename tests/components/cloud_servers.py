"""Servers with the interfaces of Google Cloud Storage (fake-gcs-server) and Azure Blob Storage (Azurite)."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.components.environments import program_of_npm, python_of
from tests.components.s3_server import Proxy

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Port(NamedTuple):
    port: int


class CloudProxy(Proxy):
    """A proxy with what the SDK of a store reads."""

    def __init__(self, port: int, variables: Callable[[str], dict[str, str]]):
        super().__init__(Port(port))
        self._variables = variables

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return self._variables(self.url)


def _gcs_variables(url: str) -> dict[str, str]:
    return {"STORAGE_EMULATOR_HOST": url, "FSSPEC_GCS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


def _azure_variables(url: str) -> dict[str, str]:
    parts = ("DefaultEndpointsProtocol=http", "AccountName=devstoreaccount1", f"AccountKey={KEY}")
    return {"AZURE_STORAGE_CONNECTION_STRING": ";".join((*parts, f"BlobEndpoint={url}/devstoreaccount1;"))}


def _gcs_command(port: int, url: str) -> list[str]:
    package = next((python_of("fakegcs").parents[1] / "lib").rglob("fake-gcs-server-linux-amd64"))
    package.chmod(0o755)
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    return [str(package), *where, "-backend", "memory", "-external-url", url, "-public-host", url.partition("://")[2]]


def _azure_command(port: int, url: str) -> list[str]:
    program = [str(program_of_npm("azurite", "azurite-blob")), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    return [*program, "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]


SERVERS = {"gs": (_gcs_variables, _gcs_command), "az": (_azure_variables, _azure_command)}


@contextmanager
def cloud_server(protocol: str) -> Iterator[CloudProxy]:
    """Start the server of a protocol, which has no bucket yet, and a proxy in front of it."""
    variables, command = SERVERS[protocol]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    proxy = CloudProxy(port, variables)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command(port, proxy.url), cwd=Path(place), env=outside, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 60
            while True:
                with socket.socket() as trial:
                    if trial.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None and time.monotonic() < end, f"the server of {protocol}:// did not start"
                time.sleep(0.1)
            yield proxy
        finally:
            process.kill()
            process.wait()
            proxy.close()
