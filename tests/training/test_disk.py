"""A disk that is full, read-only or gone while a run trains: one message each, and training goes on."""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.monitoring.observers import Observer
from megalite.training.fit import fit
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {
    **SINGLE,
    "tied": False,
    "kv_heads": 2,
    "vocab_size": 96,
    "layers": 1,
    "masked": False,
    "dropout": 0.0,
    "microbatches": 1,
}


class Between(Observer):
    """Calls a function before the steps that it is given for."""

    def __init__(self, actions: dict[int, Callable[[], Any]]):
        self.actions = actions

    def before(self, step: int) -> None:
        self.actions.get(step, lambda: None)()


def train(directory: Path, actions: dict[int, Callable[[], Any]], steps: int = 8) -> Path:
    """Train in directory/run, saving every second step; returns that directory."""
    config = config_of(CASE, write_tokens(directory, 96), run={"dir": str(directory), "name": "run"})
    config["train"]["steps"] = steps
    config["checkpoint"] = {"interval": 2}
    run_config = from_dict(config)
    trainer = Trainer(run_config, build.make_mesh(run_config))
    try:
        fit(trainer, [Between(actions)])
    finally:
        gc.unfreeze()
        gc.enable()
        trainer.close()
    assert trainer.step_done == steps
    return trainer.run_dir


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def saved(run: Path) -> list[str]:
    return sorted(path.name[-1] for path in (run / "checkpoints").glob("step_*"))


def test_a_disk_that_is_full_for_a_while(tmp_path):
    """The same disk has the file that the output is written to: its lines are lost, and none of metrics.jsonl."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    try:
        run = train(tmp_path, {3: lambda: limit(256), 7: lambda: limit(soft)})
    finally:
        limit(soft)
    assert steps_of(run) == list(range(1, 9)), "lines are kept until they can be written"
    assert saved(run) == ["2", "8"] and (run / "checkpoints" / "latest").read_text().strip() == "step_00000008"
    assert not list((run / "checkpoints").glob(".*")), "what could not be written is removed"


def test_a_directory_that_is_moved_away(tmp_path, capfd):
    run = train(tmp_path, {4: lambda: (tmp_path / "run").rename(tmp_path / "moved")})
    assert steps_of(tmp_path / "moved") == [1, 2, 3] and saved(tmp_path / "moved") == ["2"]
    assert steps_of(run) == [4, 5, 6, 7, 8] and saved(run) == ["4", "6", "8"]
    assert capfd.readouterr().err.count("was deleted or moved") == 1


def test_a_directory_that_can_no_longer_be_written(tmp_path, capfd, monkeypatch):
    """As on a file system that the kernel remounts read-only after an error: even root is refused."""
    real, refused = os.mkdir, []

    def mkdir(path: Any, *rest: Any, **options: Any) -> None:
        if refused and str(path).endswith(".saving"):
            raise OSError(30, "Read-only file system", str(path))
        real(path, *rest, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    run = train(tmp_path, {3: lambda: refused.append(True), 7: refused.clear})
    assert saved(run) == ["2", "8"]
    assert capfd.readouterr().out.count("Read-only file system") == 2


@pytest.mark.parametrize("jump", [-(10**8), 10**8])
def test_a_clock_that_jumps(tmp_path, monkeypatch, jump):
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    run = train(tmp_path, {3: lambda: shift.__setitem__(0, jump)})
    times = [json.loads(line)["step_time_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < each < 60 for each in times) and saved(run) == ["2", "4", "6", "8"]
