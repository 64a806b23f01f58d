"""What a run may do with its directory: an earlier run is never lost unasked, and a run that is complete changes
nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import step_name
from megalite.checkpoint.directories import begin, publish
from megalite.checkpoint.manifest import encode
from megalite.config import run_files
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, to_dict, write_config
from megalite.config.schema import Config
from megalite.launch.exit_status import END_FILE, ExitStatus, process_status
from megalite.launch.run_lock import InUseError
from megalite.training.job import Job, JobEnd
from megalite.training.job import begin as begin_job
from megalite.training.run_directory import claim


def config(directory: Path, steps: int = 40, **sections: dict[str, Any]) -> Config:
    return from_dict(
        {"run": {"dir": str(directory), "name": "a", **sections.pop("run", {})}, "train": {"steps": steps}, **sections}
    )


def write_run(directory: Path, step: int = 40, steps: int = 40, **sections: dict[str, Any]) -> Path:
    """A directory as a run leaves it: its metrics, its configuration, and one checkpoint, without tensors."""
    run = directory / "a"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {each}, "loss": 1.5}}\n' for each in range(1, step + 1)))
    write_config(config(directory, steps, checkpoint={"load": "none"}), run)
    place = run / "checkpoints" / step_name(step)
    publish(begin(place), place, encode({"step": step, "config": to_dict(config(directory, steps, **sections))}, {}))
    return run


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != run_files.LOCK
    }


@pytest.mark.parametrize("source", ["none", "another run's checkpoint"])
def test_a_new_run_over_an_old_one_is_refused_with_a_fresh_name_and_changes_nothing(tmp_path, source):
    run, other = write_run(tmp_path), write_run(tmp_path / "other", 10) / "checkpoints" / step_name(10)
    (tmp_path / "a-2").mkdir()
    (tmp_path / "a-2" / "metrics.jsonl").write_text("{}")
    before = content(tmp_path)
    load = "none" if source == "none" else str(other)
    with pytest.raises(
        ConfigError,
        match=r"a already contains one \(newest checkpoint: step_00000040\).*run\.name=a-3.*run\.overwrite=true",
    ):
        claim(config(tmp_path, checkpoint={"load": load}))
    assert content(tmp_path) == before and not (run / run_files.LOCK).exists()


def test_overwriting_moves_the_old_run_aside_whole(tmp_path):
    run = write_run(tmp_path)
    before = content(run)
    for number in (1, 2):
        claimed = claim(config(tmp_path, checkpoint={"load": "none"}, run={"overwrite": True}))
        assert f" to {run}.old-{number}" in claimed.notes[0]
        assert content(tmp_path / f"a.old-{number}") == before and content(run) == {}
        with pytest.raises(InUseError):
            claim(config(tmp_path))
        claimed.lock.release()
        (run / "metrics.jsonl").write_bytes(before["metrics.jsonl"])
        before = content(run)


def test_what_continues_a_run_needs_no_permission(tmp_path):
    """Its newest checkpoint, an older one of its own, and the run that a restarted job began itself with `none`."""
    run = write_run(tmp_path, 20)
    before = content(run)
    own = str(run / "checkpoints" / step_name(20))
    with pytest.raises(ConfigError, match="already contains one"):  # of other options: not what this job began
        claim(config(tmp_path, 50, checkpoint={"load": "none"}), restarted=True)
    for load, restarted in (("auto", False), (own, False), (str(run), False), ("none", True)):
        claimed = claim(config(tmp_path, checkpoint={"load": load}), restarted)
        claimed.lock.release()
        assert claimed.notes == [] and claimed.complete is None and content(run) == before


def test_an_attempt_that_has_left_no_step_is_not_a_run(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").touch()
    claim(config(tmp_path, checkpoint={"load": "none"})).lock.release()


@pytest.mark.parametrize(
    "steps, decay, message",
    [
        (40, "cosine", r"nothing to do: all 40 steps are done .*more than 40 .*checkpoint\.allow=\[horizon\]"),
        (40, "constant", r"train\.steps to more than 40\.$"),
        (30, "cosine", r"all 40 steps are done .*train\.steps=30 is not larger"),
    ],
)
def test_a_complete_run_says_so_and_is_left_alone(tmp_path, steps, decay, message):
    run = write_run(tmp_path, optimizer={"decay": decay})
    before = content(run)
    with pytest.raises(JobEnd, match=message) as end:  # on another number of ranks
        begin_job(config(tmp_path, steps, optimizer={"decay": decay}, parallel={"tp": 2}), restarted=False)
    assert end.value.status == ExitStatus.DONE
    assert content(run) == before and not (run / run_files.LOCK).exists(), (
        "config.yaml least of all: nothing has run with these options"
    )


def test_other_options_under_the_name_of_a_complete_run_are_an_error_that_lists_them(tmp_path):
    run = write_run(tmp_path)
    before = content(run)
    with pytest.raises(JobEnd) as end:
        begin_job(config(tmp_path, optimizer={"lr": 0.01}, model={"hidden_size": 64}), restarted=False)
    assert end.value.status == ExitStatus.CONFIGURATION
    head, _, *rows, way_out = str(end.value).splitlines()
    assert "run.name=a has already finished (all 40 steps are done" in head and "--run.name a-2" in way_out
    saved = to_dict(config(tmp_path))
    assert [row.split() for row in rows] == [
        ["model.hidden_size", str(saved["model"]["hidden_size"]), "64"],
        ["optimizer.lr", str(saved["optimizer"]["lr"]), "0.01"],
    ]
    assert content(run) == before and not (run / run_files.LOCK).exists()


def test_a_directory_that_can_not_be_made_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir=.*file: .*: Not a directory\. Choose another run\.dir"):
        claim(config(tmp_path / "file"))


class Store(dict):
    """The rendezvous store, as far as it is used."""

    set, get = dict.__setitem__, dict.__getitem__


def test_all_ranks_learn_what_rank_0_found(tmp_path):
    store = Store()
    job, notes = begin_job(config(tmp_path), restarted=False, rank=0, store=store)
    begin_job(config(tmp_path), restarted=False, rank=1, store=store)
    second = Store()
    for rank in (0, 1):
        with pytest.raises(JobEnd, match="locked by process") as end:
            begin_job(config(tmp_path), restarted=False, rank=rank, store=second)
        assert end.value.status == ExitStatus.IN_USE
    job.end(ExitStatus.DONE)
    assert not (tmp_path / "a" / run_files.LOCK).exists()


def test_summary_json_tells_how_the_run_stands(tmp_path):
    run = write_run(tmp_path, 20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 20, "loss": 1.5, "tokens_seen": 640, "epoch": 2.5, "epoch/data/a": 0.5, "epoch/data/b": 2.5}\n'
        )
        file.write('{"step": 20, "val_loss": 2.5}\n{"step": 21, "lo')  # a killed run's last line
    job, _ = begin_job(config(tmp_path), restarted=False)
    assert not (run / "summary.json").exists(), "nothing has been changed yet"
    job.running(20)
    content = json.loads((run / "summary.json").read_text())
    assert (content["state"], content["exit_status"], content["step"], content["loss"], content["val_loss"]) == (
        "running",
        None,
        20,
        1.5,
        2.5,
    )
    assert (content["tokens_seen"], content["epoch"], content["epochs"]) == (640, 2.5, {"data/a": 0.5, "data/b": 2.5})
    assert content["checkpoint"] == step_name(20) and content["pid"] == os.getpid()
    job.end(ExitStatus.FAILED, "rank 3: no memory\nsecond line")
    content = json.loads((run / "summary.json").read_text())
    assert (content["state"], content["exit_status"], content["reason"]) == ("failed", 1, "rank 3: no memory")


@pytest.mark.parametrize("status", list(ExitStatus))
def test_exit_statuses_reach_a_scheduler_directly_and_a_launcher_through_its_file(tmp_path, monkeypatch, status):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert process_status(status) == status
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv(END_FILE, str(tmp_path / "end"))
    saved = status in (ExitStatus.STOPPED, ExitStatus.INTERRUPTED)
    assert process_status(status) == (0 if saved else status), "torchrun would restart a run that has saved and ended"
    assert (tmp_path / "end").read_text() == str(int(status))
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / "end").unlink()
    process_status(status)
    assert not (tmp_path / "end").exists()


def test_a_job_of_another_rank_writes_nothing(tmp_path):
    Job(config(tmp_path), None).end(ExitStatus.DONE)
    assert not (tmp_path / "a").exists()
