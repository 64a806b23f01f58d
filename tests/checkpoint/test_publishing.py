"""A checkpoint is there whole or not at all, whatever happens while it is written."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite import checkpoint
from megalite.checkpoint import CheckpointError
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import Rectangle
from tests.checkpoint import jobs
from tests.support.pool import RankPool

CHANGES = [(os, "rename"), (os, "replace"), (os, "mkdir"), (os, "fsync"), (os, "unlink"), (shutil, "rmtree")]


class Killed(BaseException):
    """Stands for SIGKILL: not an error that anything handles."""


class Death:
    """Lets a process change the file system `after` times; from then on every attempt fails, clearing up included."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int):
        self.left, self.died = after, False
        for module, name in CHANGES:
            monkeypatch.setattr(module, name, self.guarded(getattr(module, name)))

    def guarded(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def guard(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                self.died = True
                raise Killed
            self.left -= 1
            return change(*args, **kwargs)

        return guard


def save(checkpoints: Path, step: int, value: float, **state: bool) -> None:
    parts = [
        Rectangle("weight/w", (3, 4), (0, 0), torch.full((3, 4), value)),
        Rectangle("scale", (), (), torch.tensor(value)),
    ]
    checkpoint.save(checkpoints / checkpoint.step_name(step), parts, {"value": value, **state}, Mesh(Layout()))


def load(directory: Path) -> float:
    """The one value of a checkpoint, after checking that all of it says the same."""
    parts = [Rectangle("weight/w", (3, 4), (0, 0), torch.zeros(3, 4)), Rectangle("scale", (), (), torch.zeros(()))]
    checkpoint.load(directory, parts)
    value = float(parts[1].tensor)
    assert torch.equal(parts[0].tensor, torch.full((3, 4), value))
    assert checkpoint.manifest_of(directory).state == {"value": value}
    return value


def newest(checkpoints: Path) -> Path:
    return checkpoint.history(checkpoints, Mesh(Layout()))[0][0]


def test_layout_of_a_published_save(tmp_path: Path) -> None:
    save(tmp_path, 100, 0.1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000100"]
    assert (tmp_path / "latest").read_text().strip() == "step_00000100"
    assert sorted(path.name for path in (tmp_path / "step_00000100").iterdir()) == ["manifest.json", "rank_00000.bin"]
    assert json.loads((tmp_path / "step_00000100" / "manifest.json").read_text())["state"] == {"value": 0.1}
    assert newest(tmp_path) == tmp_path / "step_00000100"
    assert checkpoint.latest(tmp_path / "none") is None


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_a_save_that_dies_anywhere_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    outcomes = []
    for after in range(100):
        checkpoints = tmp_path / str(after)
        save(checkpoints, 1, 1.0)
        with monkeypatch.context() as patch:
            death = Death(patch, after)
            try:
                save(checkpoints, step, 2.0)
            except (Killed, CheckpointError):
                assert death.died
        unread = shutil.copytree(checkpoints, tmp_path / f"{after}_unread")
        save(unread, 3, 3.0)
        assert load(unread / "step_00000001") in (1.0, 2.0), (
            "clearing up removes no checkpoint, nor the one that was being replaced"
        )
        outcomes.append(load(newest(checkpoints)))
        save(checkpoints, 3, 3.0)
        assert load(newest(checkpoints)) == 3.0
        left = {path.name for path in checkpoints.iterdir()} - {
            "latest",
            "step_00000001",
            "step_00000002",
            "step_00000003",
        }
        assert not left, "a complete save clears up after dead ones"
        if not death.died:
            break
    assert not death.died and outcomes == sorted(outcomes) and set(outcomes) == {1.0, 2.0}
    assert len(outcomes) > 8, "every rename, new directory and flush is a place to die"


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_that_can_not_write_is_named_on_every_rank(ranks: RankPool, tmp_path: Path, full: int) -> None:
    old, new = tmp_path / checkpoint.step_name(1), tmp_path / checkpoint.step_name(2)
    ranks.run(3, jobs.save, old, 1, 1, {})
    for message in ranks.run(3, jobs.save_with_full_disk, new, full):
        assert "failed to save" in message and "No space left on device" in message and "Errno" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", old.name]
    assert newest(tmp_path) == old
    assert all(not wrong for _, wrong in ranks.run(3, jobs.differing, old, 1, 1))


def test_rank_0_alone_decides_what_is_latest(ranks: RankPool, tmp_path: Path) -> None:
    here, stale, broken = (tmp_path / name for name in ("here", "stale", "broken"))
    save(here, 2, 2.0)
    save(stale, 1, 1.0)
    broken.mkdir()
    (broken / "latest").write_text("step_9\n")
    assert ranks.run(3, jobs.latest_seen_by, [here, stale, tmp_path]) == ["['step_00000002'] None"] * 3
    assert ranks.run(3, jobs.latest_seen_by, [tmp_path, stale, here]) == ["[] None"] * 3
    for message in ranks.run(3, jobs.latest_seen_by, [broken, stale, here]):
        assert (
            message == f"[] {broken / 'latest'} is damaged: expected the name of an existing checkpoint, found 'step_9'"
        )


def test_prune_keeps_the_newest_and_never_latest_nor_an_abandoned_future(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, float(step))
    checkpoint.prune(tmp_path, 2, Mesh(Layout()))
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step_00000003", "step_00000004"]
    save(tmp_path, 2, 2.0)  # resumed from step 1
    checkpoint.prune(tmp_path, 1, Mesh(Layout()))
    assert load(newest(tmp_path)) == 2.0
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step_00000002", "step_00000003", "step_00000004"]
    with pytest.raises(ValueError, match="checkpoint.keep must be at least 1, got 0"):
        checkpoint.prune(tmp_path, 0, Mesh(Layout()))


def test_prune_of_saves_by_time_leaves_all_others(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step, float(step), **({} if step in (2, 5) else {"timed": True}))
    checkpoint.prune(tmp_path, 2, Mesh(Layout()), spare=tmp_path / "step_00000003", timed=True)
    assert [path.name[-1] for path in sorted(tmp_path.glob("step_*"))] == ["2", "3", "4", "5", "6"]
    checkpoint.prune(tmp_path, 1, Mesh(Layout()), timed=True)
    assert [path.name[-1] for path in sorted(tmp_path.glob("step_*"))] == ["2", "5", "6"]


def test_a_directory_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    thesis = tmp_path / "step_00000001" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        save(tmp_path, 1, 1.0)
    assert thesis.read_text() == "years of work"


def test_another_name_than_a_step_moves_no_latest(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "imported", [Rectangle("w", (2,), (0,), torch.ones(2))], {}, Mesh(Layout()))
    assert [path.name for path in tmp_path.iterdir()] == ["imported"]


def test_misfits_are_named_with_expected_and_found(tmp_path: Path) -> None:
    save(tmp_path, 1, 1.0)
    rectangles = [
        Rectangle("weight/w", (3, 5), (0, 0), torch.zeros(3, 4)),
        Rectangle("weight/new", (2,), (0,), torch.zeros(2)),
        Rectangle("scale", (), (), torch.zeros((), dtype=torch.bfloat16)),
    ]
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(newest(tmp_path), rectangles)
    for line in (
        "weight/w: expected float32 [3, 5], found float32 [3, 4]",
        "weight/new: expected float32 [2], found no such tensor",
        "scale: expected bfloat16 [], found float32 []",
        str(newest(tmp_path)),
    ):
        assert line in str(error.value)
    assert float(rectangles[0].tensor.sum()) == 0


def test_each_element_must_be_given_exactly_once(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(2, jobs.save_same_rectangle, tmp_path / "c"):
        assert "weight/k at [0, 0] is stored twice, by rank 0 and by rank 1" in message
    mesh = Mesh(Layout())
    with pytest.raises(CheckpointError, match="w has 6 elements, but the ranks stored 4"):
        checkpoint.save(tmp_path / "c", [Rectangle("w", (3, 2), (0, 0), torch.ones(2, 2))], {}, mesh)
    overlapping = [Rectangle("w", (2, 2), (0, 0), torch.ones(1, 2)), Rectangle("w", (2, 2), (0, 1), torch.ones(2, 1))]
    with pytest.raises(CheckpointError, match="overlapping"):
        checkpoint.save(tmp_path / "c", overlapping, {}, mesh)
    assert not list(tmp_path.iterdir())


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint: the directory does not exist"):
        checkpoint.load(tmp_path / "nowhere", [])
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: manifest\.json is missing"):
        checkpoint.manifest_of(tmp_path)


def test_saving_and_loading_are_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, 1, 1.0)
        load(newest(tmp_path))
    assert capfd.readouterr() == ("", "")


def test_importing_it_imports_no_torch() -> None:
    code = "import megalite.checkpoint, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
