"""Uploads of a run's spool to a store, on memory://, with a store that fails."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, find
from megalite.checkpoint.uploads import RunUploads, clean
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.mesh.layout import Layout
from megalite.mesh.mesh import Mesh
from megalite.parallel.spec import Rectangle
from megalite.stores.arrival import fetch_run
from megalite.stores.object_store import store_of
from megalite.stores.stubs import published
from megalite.training.job import JobEnd, begin

URL = "memory://bucket/runs"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("MEGALITE_CACHE", str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    options: dict[str, Any] = {"dir": URL, "name": "a", "spool": str(tmp_path / "spool")}
    return from_dict({"run": options, "store": {"retry": "1s", "final_wait": "3s"}})


def save(config: Config, step: int, keep: int | None = None) -> list[str]:
    """Save a checkpoint with the step as its values. Returns the names of those that were pruned."""
    checkpoints = config.run.directory / "checkpoints"
    values = torch.full((100,), float(step))
    part = Rectangle("weight/a", (100,), (0,), values)
    checkpoint.save(checkpoints / f"step_{step:08d}", [part], {"step": step}, Mesh(Layout()), spooled=True)
    return [] if keep is None else checkpoint.prune(checkpoints, keep, Mesh(Layout()))


def content(path: Path) -> float:
    values = torch.empty(100)
    checkpoint.load(path, [Rectangle("weight/a", (100,), (0,), values)])
    assert len(values.unique()) == 1
    return values[0].item()


def uploaded(config: Config) -> set[int]:
    return set(published(store_of(URL), f"{URL}/a/checkpoints").steps)


def newest(config: Config) -> int:
    """The step from which a run goes on."""
    path = checkpoint.latest(config.run.directory / "checkpoints")
    return 0 if path is None else int(path.name.removeprefix("step_"))


def test_what_is_published_can_be_loaded_from_another_machine(config, tmp_path):
    uploads = RunUploads(config, 0)
    uploads.start(newest(config))
    for step in (1, 2, 3):
        uploads.saved(config.run.directory / f"checkpoints/step_{step:08d}", save(config, step, keep=2))
        (config.run.directory / "metrics.jsonl").write_text(f"{step}\n")
    uploads.wait()
    assert uploaded(config) == {2, 3}
    assert store_of(URL).read(f"{URL}/a/metrics.jsonl") == b"3\n"
    assert content(find(Path(f"{URL}/a"))) == 3
    shutil.rmtree(config.run.directory)  # another machine
    fetch_run(f"{URL}/a", config.run.directory)
    assert content(find(config.run.directory)) == 3
    assert content(config.run.directory / "checkpoints/step_00000002") == 2
    assert (config.run.directory / "metrics.jsonl").read_text() == "3\n"
    uploads.close()


def test_a_save_of_the_same_step_replaces_it_by_its_manifest(config):
    uploads = RunUploads(config, 0)
    uploads.start(newest(config))
    save(config, 5)
    uploads.saved(config.run.directory / "checkpoints/step_00000005")
    uploads.wait()
    before = store_of(URL).find(f"{URL}/a/checkpoints/step_00000005")
    save(config, 5)
    uploads.saved(config.run.directory / "checkpoints/step_00000005")
    uploads.wait()
    after = store_of(URL).find(f"{URL}/a/checkpoints/step_00000005")
    assert len(after) == len(before) == 2
    assert set(after) & set(before) == {"manifest.json"}  # no file of a published checkpoint is overwritten
    uploads.close()


def test_a_save_during_the_publication_of_the_same_step_keeps_its_files(config, monkeypatch):
    directory, store = config.run.directory / "checkpoints/step_00000005", store_of(URL)
    write, rank_1, again = store.write, f"{URL}/a/checkpoints/step_00000005/rank_00001-new.bin", []
    uploads = RunUploads(config, 0)

    def slow(url: str, data: bytes) -> None:
        write(url, data)
        if url.endswith("manifest.json") and not again:
            again.append(save(config, 5))
            write(rank_1, b"uploaded by another rank, which is faster")

    monkeypatch.setattr(store, "write", slow)
    save(config, 5)
    uploads.saved(directory)
    uploads._round()
    assert again and store.info(rank_1) is not None
    store.delete([f"{URL}/a/checkpoints/step_00000005/manifest.json"])
    uploads._removed_in_store(store, [directory.name])
    assert store.info(rank_1) is not None
    monkeypatch.undo()


def test_another_node_does_not_wait_for_what_was_pruned_before_its_publication(config, tmp_path):
    node = from_dict({"run": {"dir": URL, "name": "a", "spool": str(tmp_path / "b")}, "store": {"final_wait": "5s"}})
    ranks = RunUploads(config, 0), RunUploads(node, 1)
    ranks[1].start(0)
    for step in (1, 2, 3):
        removed, name = save(config, step, keep=2), f"checkpoints/step_{step:08d}"
        (node.run.directory / name).mkdir(parents=True)
        shutil.copy(config.run.directory / name / "manifest.json", node.run.directory / name)
        ranks[0].saved(config.run.directory / name, removed)
        ranks[1].saved(node.run.directory / name, removed)
    ranks[0].start(newest(config))  # its uploads are slow
    for uploads in ranks:
        uploads.wait()
        uploads.close()
    assert uploaded(config) == {2, 3}
    names = sorted(path.name for path in (node.run.directory / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000003"]


def test_a_store_that_fails_delays_uploads_and_prunes_nothing_there(config, monkeypatch, capsys):
    store, fails = store_of(URL), True
    upload = store.upload

    def failing(file: Path, url: str, part_bytes: int) -> None:
        if fails:
            raise OSError("SlowDown")
        upload(file, url, part_bytes)

    uploads = RunUploads(config, 0)
    uploads.start(newest(config))
    save(config, 1)
    uploads.saved(config.run.directory / "checkpoints/step_00000001")
    uploads.wait()
    monkeypatch.setattr(store, "upload", failing)
    for step in (2, 3, 4):
        uploads.saved(config.run.directory / f"checkpoints/step_{step:08d}", save(config, step, keep=2))
    with pytest.raises(CheckpointError, match=r"step_00000003, step_00000004 of .* = 3s \(OSError: SlowDown"):
        uploads.wait()
    assert uploaded(config) == {1}  # pruned here, but what replaces it is not there yet
    fails = False
    uploads.wait()
    assert uploaded(config) == {3, 4}
    uploads.close()
    messages = capsys.readouterr().err
    assert messages.count("The run goes on") == 1 and f"{URL}/a answers again" in messages


def test_a_killed_job_leaves_its_checkpoints_to_the_next_one(config):
    save(config, 1)
    save(config, 2)
    fetch_run(f"{URL}/a", config.run.directory)  # nothing is there
    assert clean(config) == []
    uploads = RunUploads(config, 0)
    uploads.start(newest(config))
    uploads.wait()
    assert uploaded(config) == {1, 2}
    uploads.close()


def test_a_checkpoint_that_the_run_went_on_without_is_not_uploaded(config, tmp_path, capsys):
    other = from_dict({"run": {"dir": URL, "name": "a", "spool": str(tmp_path / "b")}})

    def job(machine: Config, *steps: int) -> None:
        fetch_run(f"{URL}/a", machine.run.directory)
        uploads = RunUploads(machine, 0)
        uploads.start(newest(machine))
        for step in steps:
            uploads.saved(machine.run.directory / f"checkpoints/step_{step:08d}", save(machine, step))
            uploads.wait()
        uploads.wait()
        uploads.close()

    job(config, 1)
    save(config, 3)  # this machine is lost before the upload
    save(config, 9)
    job(other, 2, 4)
    job(config)  # and comes back
    listing = published(store_of(URL), f"{URL}/a/checkpoints")
    assert (set(listing.steps), listing.newest) == ({1, 2, 4}, 4)
    said = capsys.readouterr().err
    assert "step_00000003 was removed" in said
    aside = config.run.directory / "checkpoints/unpublished/step_00000009"
    assert f"step_00000009 was not uploaded, and the run goes on from step 4 without it: moved to {aside}" in said
    assert content(aside) == 9
    job(config, 10)
    job(config)  # step 9 is now an earlier one
    assert uploaded(config) == {1, 2, 4, 10}


def test_a_run_that_resumes_from_an_earlier_step_does_not_upload_the_later_ones(config):
    uploads = RunUploads(config, 0)
    uploads.start(0)
    save(config, 1)
    uploads.saved(config.run.directory / "checkpoints/step_00000001")
    uploads.wait()
    uploads.close()
    save(config, 2)  # not uploaded when the job was killed
    uploads = RunUploads(config, 0)
    uploads.start(1)  # checkpoint.load names step 1
    save(config, 2)
    uploads.saved(config.run.directory / "checkpoints/step_00000002")
    uploads.wait()
    uploads.close()
    assert uploaded(config) == {1, 2}
    aside = config.run.directory / "checkpoints/unpublished"
    assert [path.name for path in aside.iterdir()] == ["step_00000002"]


def test_a_bucket_that_is_missing_ends_the_job_with_one_message(config, monkeypatch):
    def missing(url: str) -> int:
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(store_of(URL), "abort_uploads", missing)
    with pytest.raises(JobEnd, match=r"run.dir: the bucket of .* does not exist \(.*Create it, or correct run.dir"):
        begin(config, restarted=False)
    assert not (config.run.directory / "lock").exists()


def test_the_spool_has_a_limit(config):
    config.store.spool_gb = 1.5e-6
    uploads = RunUploads(config, 0)  # not started: nothing is uploaded
    for step in (1, 2):
        uploads.check()
        save(config, step)
        uploads.saved(config.run.directory / f"checkpoints/step_{step:08d}")
    with pytest.raises(CheckpointError, match=r"store.spool_gb = 1.5e-06 is reached: 1.02 kB .* wait for"):
        uploads.check()


def test_data_that_is_damaged_in_the_store_is_found(config):
    save(config, 1)
    uploads = RunUploads(config, 0)
    uploads.start(newest(config))
    uploads.wait()
    uploads.close()
    [name] = [each for each in store_of(URL).find(f"{URL}/a/checkpoints") if each.endswith(".bin")]
    url, stub = f"{URL}/a/checkpoints/{name}", find(Path(f"{URL}/a"))
    store_of(URL).write(url, np.zeros(512, np.uint8).tobytes())
    with pytest.raises(CheckpointError, match=f"{url} is damaged: expected checksum"):
        content(stub)
    store_of(URL).write(url, b"short")
    with pytest.raises(CheckpointError, match=f"{url} is damaged: expected 512 bytes, found 5"):
        content(stub)
    store_of(URL).delete([url])
    with pytest.raises(CheckpointError, match=f"{url} is damaged: expected 512 bytes, found no object"):
        content(stub)
