"""Stores and token files in them, on fsspec's memory:// and file://."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest

from megalite.checkpoint import CheckpointError, find
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.rule import is_checkpoint
from megalite.data import dataset
from megalite.stores import object_store
from megalite.stores.errors import StoreError
from megalite.stores.object_store import patiently, store_of
from megalite.stores.stubs import published
from megalite.stores.token_files import CachedObject, evict, local_prefix
from megalite.stores.url import is_url, local, normal
from tests.support.configs import write_tokens


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGALITE_CACHE", str(tmp_path / "cache"))
    local_prefix.cache_clear()
    fsspec.filesystem("memory").store.clear()
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/runs/", "s3://bucket/runs"),
        ("s3:/bucket//runs", "s3://bucket/runs"),  # as pathlib writes it
        ("file:///data/runs", "file:///data/runs"),
        ("gs://bucket", "gs://bucket"),
        ("hf:/models/llama", None),
        ("runs/s3", None),
    ],
)
def test_what_names_a_store(text, url):
    assert is_url(text) == (url is not None)
    if url is not None:
        assert normal(text) == normal(Path(text)) == url
        assert local("spool", url) == Path("spool", *url.replace("://", "/").strip("/").split("/"))


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_objects(protocol, tmp_path):
    url = f"{protocol}://{tmp_path}/store"
    store = store_of(url)
    assert (store.info(f"{url}/a"), store.find(url)) == (None, {})
    store.write(f"{url}/a", b"0123456789")
    (tmp_path / "source").write_bytes(b"b" * 100)
    store.upload(tmp_path / "source", f"{url}/deep/b", part_bytes=10)
    assert {name: listing.size for name, listing in store.find(url).items()} == {"a": 10, "deep/b": 100}
    assert (store.read(f"{url}/a"), store.read(f"{url}/a", 3, 7)) == (b"0123456789", b"3456")
    assert (store.replace(f"{url}/a", b"new", None), store.conditional) == (None, False)
    store.delete([f"{url}/a", f"{url}/deep/b", f"{url}/never"])
    assert (store.find(url), store.abort_uploads(url)) == ({}, 0)


def test_accesses_are_tried_again(monkeypatch):
    monkeypatch.setattr(object_store, "_FIRST_PAUSE_S", 0.001)
    problems = [OSError("busy"), TimeoutError(), RuntimeError("closed")]

    def action() -> str:
        if problems:
            raise problems.pop()
        return "done"

    assert patiently(action, "s3://bucket") == "done"
    problems[:] = [OSError("busy")] * 1000
    with pytest.raises(StoreError, match=r"s3://bucket could not be reached for 0 s \(OSError: busy\)"):
        patiently(action, "s3://bucket", 0.01)
    problems[:] = [PermissionError("no")]
    with pytest.raises(StoreError, match="access is denied"):
        patiently(action, "s3://bucket")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("megalite.stores.object_store._connected", object_store._connected.__wrapped__)
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(StoreError, match=r"package s3fs. Install it with `pip install 'megalite\[stores\]'`"):
        store_of("s3://other-bucket")


def test_without_latest_the_manifest_written_last_is_the_newest():
    store, url = store_of("memory://runs"), "memory://runs/a/checkpoints"
    for step in (30, 10, 20):  # a run that went back to step 10
        store.write(f"{url}/step_{step:08d}/rank_00000.bin", b"data")
        if step != 20:  # the save of step 20 is under way
            store.write(f"{url}/step_{step:08d}/manifest.json", b"{}")
    listing = published(store, url)
    assert (set(listing.steps), listing.newest) == ({10, 30}, 10)
    store.write(f"{url}/latest", b"step_00000030\n")
    assert published(store, url).newest == 30
    store.write(f"{url}/latest", b"step_00000020\n")  # not published
    assert published(store, url).newest == 10


def test_a_url_without_checkpoint_is_named():
    assert not is_checkpoint("memory://runs/nothing")
    with pytest.raises(CheckpointError, match=r"memory://runs/nothing is not a checkpoint: manifest.json is missing"):
        find(Path("memory://runs/nothing"))


def test_token_files_of_a_store_give_the_same_samples(tmp_path):
    prefix = write_tokens(tmp_path, 50)
    for end in (".bin", ".idx", ".json"):
        store_of("memory://").upload(Path(f"{prefix}{end}"), f"memory://data/tokens{end}", 1 << 20)

    def samples(train: str) -> tuple[str, list[list[int]]]:
        data = from_dict({"data": {"train": train, "sequence_length": 64, "validation": 0.1}}).data
        both = dataset.build(data, seed=3)
        return both[0].fingerprint, [each[i].tokens.tolist() for each in both for i in range(20)]

    assert samples("memory://data/tokens") == samples(prefix)


def test_blocks_are_read_once_and_kept_up_to_a_limit(cache, monkeypatch):
    content, url = np.random.default_rng(0).bytes(10_000), "memory://data/tokens.bin"
    store = store_of(url)
    store.write(url, content)
    read = []
    monkeypatch.setattr(store, "read", lambda of, start, stop, tag: read.append(start) or content[start:stop])
    for _ in range(2):  # the second one is another rank of the node
        file = CachedObject(url, block=1000)
        assert file.read(1500, 3200) == content[1500:3200]
        assert file.read(9990, 10_000) == content[9990:]
    assert read == [1000, 2000, 3000, 9000]
    blocks = sorted(cache.glob("blocks/*/0*"))
    blocks[0].write_bytes(b"short")  # a disk that was full
    assert file.read(1000, 1010) == content[1000:1010]
    os.utime(blocks[1], (1, 1))
    evict(cache / "blocks", 3000)
    assert sorted(cache.glob("blocks/*/0*")) == [blocks[0], *blocks[2:]]
    store.write(url, content[::-1])
    monkeypatch.undo()
    assert CachedObject(url, block=1000).read(0, 10) == content[::-1][:10]  # another version has blocks of its own


def test_a_token_file_that_is_not_there_is_named(tmp_path):
    shutil.copy(f"{write_tokens(tmp_path, 50)}.idx", tmp_path / "alone.idx")
    with pytest.raises((ConfigError, StoreError), match=r"alone.bin does not exist"):
        dataset.build(from_dict({"data": {"train": f"file://{tmp_path}/alone", "sequence_length": 8}}).data, 0)
