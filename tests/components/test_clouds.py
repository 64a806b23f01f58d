"""Runs in Google Cloud Storage and Azure Blob Storage: their emulators, through gcsfs and adlfs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.components.cloud_servers import SERVERS, CloudProxy, cloud_server
from tests.components.environments import python_of
from tests.components.forks import Forks
from tests.components.s3_server import Request, descendants
from tests.components.test_stores import IMPORTED, OURS, Machine, losses
from tests.support.configs import write_tokens

STORE = """
import json, sys
from megalite.stores.errors import ConflictError
from megalite.stores.object_store import store_of
from megalite.stores.stubs import published

url = sys.argv[1]
store = store_of(url)
"""
LISTING = """
listing = published(store, url + "/checkpoints")
files = {name: each.size for name, each in listing.objects.items()}
missing = [
    name
    for step in listing.steps
    for name, size in json.loads(store.read(f"{url}/checkpoints/step_{step:08d}/manifest.json"))["files"].items()
    if files.get(f"step_{step:08d}/{name}") != size
]
lines = store.read(url + "/metrics.jsonl").decode()
print(json.dumps({"steps": sorted(listing.steps), "latest": listing.newest, "missing": missing, "lines": lines}))
"""
BUCKET = """
store.fs.mkdir(store.fs.split_path(store.path(url))[0])
print("null")
"""
CONDITIONS = """
def conflicts(known):
    try:
        store.replace(url, b"other", known)
    except ConflictError:
        return True

first = store.replace(url, b"one", None)
seen = [store.conditional, store.info(url).tag == first, store.find(url.rpartition("/")[0])["latest"].tag == first]
seen += [store.replace(url, b"one", None) == first]  # the answer to the first try was lost
second = store.replace(url, b"two", first)
seen += [conflicts(None), conflicts(first), store.read(url) == b"two", store.read(url, 1, 2) == b"w"]
store.delete([url, url])
seen += [conflicts(second), store.info(url) is None, store.find(url.rpartition("/")[0]) == {}]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module", params=SERVERS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cloud(protocol: str) -> Iterator[CloudProxy]:
    with cloud_server(protocol) as started:
        ask(started, BUCKET, f"{protocol}://bucket/runs")
        yield started


@pytest.fixture
def proxy(cloud: CloudProxy) -> Iterator[CloudProxy]:
    yield cloud
    cloud.reset()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), 257)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks(python_of("stores"), [*IMPORTED, "gcsfs", "adlfs"], {**os.environ, **OURS})
    yield started
    started.close()


def ask(cloud: CloudProxy, program: str, url: str) -> Any:
    """What a program prints of a store."""
    environment = {**os.environ, **cloud.environment, **OURS}
    command = [python_of("stores"), "-c", STORE + program, url]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def killed_at(proxy: CloudProxy, at: int, machine: Machine, words: list[str]) -> None:
    """Run a command until its at-th request that writes, which does not arrive, and kill it there."""
    writes: list[Request] = []
    started: list[int] = []

    def kill(request: Request) -> None:
        if request.method in ("PUT", "POST", "DELETE"):
            writes.append(request)
            if len(writes) == at:
                proxy.failing = "closed"
                for pid in descendants(started[0]):
                    os.kill(pid, signal.SIGKILL)

    proxy.before = kill
    started.append(machine.start(*words))
    status, output = machine.end()
    assert status == -signal.SIGKILL, output
    proxy.reset()


def test_writes_on_a_condition(protocol, proxy):
    assert all(ask(proxy, CONDITIONS, f"{protocol}://bucket/first/latest"))


def test_a_killed_run_goes_on_from_what_it_has_published(protocol, proxy, tokens, forks, tmp_path):
    machine, url = Machine(tmp_path / "machine", proxy, tokens, forks), f"{protocol}://bucket/runs"
    machine.run(*machine.training("local", 6, "--checkpoint.interval", "1000", url=str(tmp_path)))
    machine.run(*machine.training("killed", 2, url=url))
    listing = ask(proxy, LISTING, f"{url}/killed")
    assert (listing["steps"], listing["latest"], listing["missing"]) == ([1, 2], 2, [])
    for number, at in enumerate((2, 5), 3):  # requests that write, of the next save
        killed_at(proxy, at, machine, machine.training("killed", number + 1, url=url))
        listing = ask(proxy, LISTING, f"{url}/killed")
        assert listing["missing"] == [] and listing["latest"] >= 2 and len(listing["steps"]) >= 2
    shutil.rmtree(machine.directory)  # another machine
    output = machine.run(*machine.training("killed", 6, url=url))
    assert f"resumed after step {listing['latest']}," in output
    listing = ask(proxy, LISTING, f"{url}/killed")
    assert (listing["steps"], listing["latest"], listing["missing"]) == ([5, 6], 6, [])
    assert losses(listing["lines"]) == losses((tmp_path / "local" / "metrics.jsonl").read_text())
    other = Machine(tmp_path / "other", proxy, tokens, forks)
    assert re.findall(r"step_0000000\d .* whole", other.run("checkpoint", "list", f"{url}/killed"))
    assert "is intact" in other.run("checkpoint", "verify", f"{url}/killed/checkpoints/latest")


def test_two_jobs_do_not_overwrite_each_other(protocol, proxy, tokens, forks, tmp_path):
    second, url = (
        Forks(python_of("stores"), [*IMPORTED, "gcsfs", "adlfs"], {**os.environ, **OURS}),
        f"{protocol}://bucket",
    )
    one, other = Machine(tmp_path / "one", proxy, tokens, forks), Machine(tmp_path / "other", proxy, tokens, second)
    one.run(*one.training("twice", 1, url=url))

    def once(request: Request) -> None:  # while one machine uploads, another one publishes a checkpoint
        if request.method in ("PUT", "POST"):
            proxy.before = lambda request: None
            other.run(*other.training("twice", 2, url=url))

    proxy.before = once
    output = one.run(*one.training("twice", 3, url=url), status=1)
    second.close()
    assert "checkpoints/latest has been written by another process" in output
    listing = ask(proxy, LISTING, f"{url}/twice")
    assert listing["latest"] == 2 and listing["missing"] == []
