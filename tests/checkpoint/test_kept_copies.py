"""Copies in memory that launchers save on the disk when their ranks have ended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megalite import checkpoint
from megalite.checkpoint.kept_copies import newest_published, save_newest
from tests.checkpoint import jobs_copies
from tests.support.pool import RankPool


def test_launchers_of_several_nodes_publish_the_newest_copy_together(ranks: RankPool, tmp_path: Path) -> None:
    """Node a has no file of rank 2, which is on b and c; a remnant of an interrupted save is not taken for it."""
    memory, checkpoints = tmp_path / "memory", tmp_path / "checkpoints"
    ranks.run(4, jobs_copies.copy, memory, ("a", "a", "b", "c"), (1, 2, 3))
    shutil.rmtree(memory / "b" / "step_00000003")  # lost while it was made
    shutil.rmtree(memory / "c" / "step_00000003")
    interrupted, file = checkpoints / ".step_00000002.saving", memory / "c" / "step_00000002" / "rank_00002.bin"
    interrupted.mkdir(parents=True)
    (interrupted / file.name).write_bytes(bytes(file.stat().st_size))
    lines = save_newest(memory / "a", checkpoints, None)
    assert [line.partition(";")[0] for line in lines] == [
        f"saved this node's files of the copy in memory of step_0000000{step}" for step in (3, 2)
    ] and all("added rank_00002.bin" in line for line in lines)
    assert checkpoint.latest(checkpoints) is None
    published = checkpoints / "step_00000002"
    assert save_newest(memory / "b", checkpoints, None) == [f"saved the copy in memory of step_00000002: {published}"]
    assert save_newest(memory / "c", checkpoints, None) == []
    assert checkpoint.latest(checkpoints) == published and checkpoint.manifest_of(published).verify() > 0
    copied = {path.name for node in "abc" for path in (memory / node / "step_00000002").iterdir()}
    assert {path.name for path in published.iterdir()} == copied


def test_a_copy_is_saved_only_if_it_is_newer_and_else_stays_where_it_can_be_moved_from(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, checkpoints = tmp_path / "memory", tmp_path / "checkpoints"
    ranks.run(1, jobs_copies.copy, memory, ("a",), (1, 2))
    ranks.run(1, jobs_copies.copy, memory, ("later",), (5,))
    save_newest(memory / "later", checkpoints, None)
    before = newest_published(checkpoints)
    assert save_newest(memory / "a", checkpoints, None) == []
    save_newest(memory / "a", checkpoints, before)  # of a run that did not start from step 5
    assert checkpoint.latest(checkpoints) == checkpoints / "step_00000002"
    shutil.rmtree(checkpoints)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    (line,) = save_newest(memory / "a", checkpoints, None)
    kept = memory / "megalite-kept-a"
    assert line == (
        "the copy in memory of step_00000002 could not be saved: No space left on device\nit stays in memory: make "
        f"room, move {kept / 'step_00000002'} to {checkpoints}, and repeat the command with --checkpoint.load "
        f"{checkpoints / 'step_00000002'}"
    )
    checkpoints.mkdir(exist_ok=True)
    shutil.move(kept / "step_00000002", checkpoints)
    assert checkpoint.manifest_of(checkpoint.find(checkpoints / "step_00000002")).verify() > 0
    assert not (memory / "a").exists()
