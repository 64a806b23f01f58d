"""Saves by time: when they are due, how much of the time they take, and what is said of them."""

from __future__ import annotations

import gc
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from megalite import checkpoint
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.config.sections.checkpoint import CheckpointConfig
from megalite.launch.exit_status import ExitStatus
from megalite.monitoring.observers import Observer
from megalite.planner.memory import states
from megalite.training.checkpointing import describe_saves
from megalite.training.fit import fit
from megalite.training.stop_requests import INTERRUPT, SAVE, SHARE, STOP, SaveTimer, requested_end, save_requested
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


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def result(step: int, stop: float) -> Any:
    return SimpleNamespace(step=step, stop=stop)


def test_a_save_is_due_after_the_minutes_since_the_last_one() -> None:
    clock = Clock()
    timer = SaveTimer(CheckpointConfig(minutes=15), lead=True, clock=clock)
    seconds = []
    for second in range(1, 3601):
        clock.now += 1
        if timer.value:
            seconds.append(second)
            timer.saved(step=second, seconds=2.0)
        elif second == 1200:
            timer.saved(step=second, seconds=2.0)  # for another reason, such as a validation
    assert seconds == [900, 2100, 3000]


@pytest.mark.parametrize("seconds, pause", [(1.0, 900), (47.0, 900), (100.0, 1900), (600.0, 11400)])
def test_saves_take_at_most_a_share_of_the_time(seconds: float, pause: int) -> None:
    clock = Clock()
    timer = SaveTimer(CheckpointConfig(), lead=True, clock=clock)
    clock.now += 900
    assert timer.value == SAVE, "how long one takes is not known yet"
    clock.now += seconds
    timer.saved(1, seconds)
    clock.now += pause - 1
    assert not timer.value
    clock.now += 1
    assert timer.value == SAVE and seconds / (seconds + pause) <= SHARE


@pytest.mark.parametrize(
    "options, asks",
    [({"interval": 5}, True), ({"minutes": None}, True), ({}, False)],
    ids=["interval", "off", "rank 1"],
)
def test_others_never_ask(options: dict[str, Any], asks: bool) -> None:
    clock = Clock()
    timer = SaveTimer(CheckpointConfig(**options), lead=asks, clock=clock)
    clock.now += 1e9
    assert timer.value == 0.0


def test_what_was_asked_for_twice_is_saved_once() -> None:
    """Under optimistic steps a request is known with the next step, for which it has been made again."""
    timer = SaveTimer(CheckpointConfig(), lead=False, clock=Clock())
    assert not timer.due([result(4, 0.0)]) and not timer.due([])
    assert timer.due([result(5, SAVE)])
    timer.saved(6, 1.0)
    assert not timer.due([result(6, SAVE)]) and timer.due([result(7, SAVE)])


def test_after_a_rollback_the_time_counts_from_there(tmp_path, capsys) -> None:
    """The save of step 6, in the midst of bad steps, is after what the run goes back to: it holds nothing of what
    follows."""
    clock, advances = Clock(), {3: [900], 5: [0, 899], 6: [900, 1]}

    class Hours(Observer):
        def before(self, step: int) -> None:
            clock.now += advances[step].pop(0) if advances.get(step) else 0

    faults = {"inject": "nan:step=5-7", "skip_limit": 3, "rollback": True}
    config = from_dict(
        config_of(
            CASE,
            write_tokens(tmp_path, 96),
            run={"dir": str(tmp_path), "name": "run"},
            train={"steps": 8},
            faults=faults,
        )
    )
    trainer = Trainer(config, build.make_mesh(config))
    try:
        fit(trainer, [Hours()], clock=clock)
    finally:
        gc.unfreeze()
        gc.enable()
        trainer.close()
    printed = capsys.readouterr().out
    assert re.findall(r"(?:saved|back after) \S*?(?:step |step_0000000)(\d)", printed) == ["3", "6", "3", "6", "8"]


@pytest.mark.parametrize(
    "others, end", [(0.0, None), (3 * STOP, ExitStatus.STOPPED), (511 * INTERRUPT + STOP, ExitStatus.INTERRUPTED)]
)
@pytest.mark.parametrize("save", [0.0, SAVE])
def test_a_save_and_an_end_are_told_apart_in_one_sum(others: float, end: ExitStatus | None, save: float) -> None:
    assert requested_end(others + save) == end and save_requested(others + save) == bool(save)


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "a checkpoint every 15 minutes (checkpoint.minutes), about 12 MB each; the newest 2 of these are kept"),
        ({"keep": 3}, "a checkpoint every 15 minutes (checkpoint.minutes), about 12 MB each; the newest 3 are kept"),
        ({"interval": 500}, "a checkpoint every 500 steps, about 12 MB each; all are kept"),
        (
            {"minutes": None},
            "no checkpoint before the end or a signal: checkpoint.interval and checkpoint.minutes are null",
        ),
    ],
)
def test_a_line_says_when_a_run_saves_and_what_it_keeps(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "checkpoint_bytes", lambda config: 12_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**9))
    assert describe_saves(from_dict({"checkpoint": options})) == said


@pytest.mark.parametrize("free, warned", [(36e6, False), (35e6, True)])
def test_a_disk_without_room_for_them_is_told_before_the_first(
    free: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "checkpoint_bytes", lambda config: 12_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    said = describe_saves(from_dict({}))
    assert said.endswith("runs/run has 35 MB free, and 3 of them need 36 MB" if warned else "are kept")
    assert checkpoint.directories.TIMED_KEPT + 1 == 3, "two are kept while the next one is written"
