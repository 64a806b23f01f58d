"""Trackers get what metrics.jsonl gets, once a step, and never hold or end a run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.config.sections.logging import LoggingConfig
from megalite.monitoring.metrics import MetricsWriter
from megalite.monitoring.trackers import recipient, selection
from megalite.monitoring.trackers.client import Measurement
from megalite.monitoring.trackers.mlflow import metric_name
from megalite.monitoring.trackers.recipient import Recipient
from megalite.monitoring.trackers.selection import check_packages
from tests.monitoring.test_metrics import example, lines, write_run

LIMIT_S = 240  # what a test waits for another thread


class FakeTracker:
    """Stores measurements; fails at opening or storing while `down`, always at `poison`, and hangs until `free`."""

    def __init__(self) -> None:
        self.stored: list[float] = []
        self.opened: list[int] = []
        self.ended: list[bool] = []
        self.down, self.refuses, self.poison = False, False, -1.0
        self.free = threading.Event()
        self.free.set()

    def open(self, step: int) -> FakeTracker:
        self.free.wait(LIMIT_S)
        if self.down:
            raise ConnectionError("no route to host\nand more")
        self.opened.append(step)
        return self

    def log(self, measurements: Sequence[Measurement]) -> None:
        self.free.wait(LIMIT_S)
        values = [measurement.scalars["loss"] for measurement in measurements]
        if self.down or self.poison in values or (self.refuses and values):
            raise SystemExit("it was refused")
        self.stored += values

    def close(self, failed: bool) -> None:
        self.ended.append(failed)


def until(condition) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTracker:
    monkeypatch.setattr(recipient, "RETRY_S", 0.0)
    return FakeTracker()


def test_a_tracker_that_was_down_gets_every_line_in_order(fake, capfd):
    """When it comes back during the run, and when it is back at the end."""
    fake.down = True
    tracker = Recipient("Fake", fake.open, 4)
    for step in range(5, 25):
        tracker.log({"loss": float(step)}, step)
    until(lambda: tracker._failing)
    fake.down = False
    until(lambda: len(fake.stored) == 20)
    fake.down = True
    tracker.log({"loss": 25.0}, 25)
    until(lambda: tracker._failing)
    fake.down = False
    tracker.log({"loss": 26.0}, 26)
    tracker.close(failed=True)
    assert fake.stored == [float(step) for step in range(5, 27)] and fake.opened[0] == 4 and fake.ended == [True]
    err = capfd.readouterr().err
    assert err.splitlines() == ["Fake failed: no route to host. Training continues; the next attempt is in 0 s"]


def test_a_tracker_that_stays_down_is_one_warning_and_a_count(fake, capfd, monkeypatch):
    monkeypatch.setattr(recipient, "MOST_WAITING", 30)
    fake.down = True
    tracker = Recipient("Fake", fake.open, 0)
    for step in range(1, 101):
        tracker.log({"loss": float(step)}, step)
        assert len(tracker._waiting) <= 30
    tracker.close()
    err = capfd.readouterr().err
    assert err.count("Fake failed: no route to host. Training continues") == 1 and "and more" not in err
    assert "Fake lacks 100 of the 100 lines of this start: no route to host. metrics.jsonl has them all" in err


def test_a_line_that_a_tracker_refuses_does_not_keep_the_others(fake, capfd):
    fake.poison = 3.0
    tracker = Recipient("Fake", fake.open, 0)
    for step in range(1, 10):
        tracker.log({"loss": float(step)}, step)
    until(lambda: len(fake.stored) == 8)
    tracker.close()
    assert fake.stored == [float(step) for step in range(1, 10) if step != 3]
    assert "Fake lacks 1 of the 9 lines of this start: it was refused" in capfd.readouterr().err


def test_a_tracker_that_hangs_holds_no_step_and_the_end_for_a_while(fake, capfd, monkeypatch):
    monkeypatch.setattr(recipient, "HANGS_S", 0.0)
    monkeypatch.setattr(recipient, "CLOSE_S", 0.01)
    fake.free.clear()  # steps return although it is not set
    tracker = Recipient("Fake", fake.open, 0)
    for step in range(1, 10):
        tracker.log({"loss": float(step)}, step)
    tracker.close()
    err = capfd.readouterr().err
    fake.free.set()
    assert err.count("Fake has not answered for 0 s. Training continues; up to 10,000 lines wait for it") == 1
    assert "Fake lacks 9 of the 9 lines of this start: it did not answer within 0 s" in err


def test_a_run_that_ends_by_an_error_has_failed_on_its_tracker(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "_opener", lambda tracker, run: fake.open)
    config = Config(logging=LoggingConfig(mlflow=True))
    with pytest.raises(ZeroDivisionError), MetricsWriter(tmp_path, 0, config) as writer:
        writer.step(example(1, loss=0.5))
        writer.step(example(2, loss=1 / 0))
    assert fake.ended == [True] and fake.stored == [0.5]


def test_names_of_metrics_that_mlflow_takes():
    names = ["val_loss/../data/a b", "loss//data/x(1)", "gpu_power_w", "lr", "loss/" + "x" * 300]
    assert [metric_name(name) for name in names] == [
        *("val_loss/_/data/a b", "loss/data/x_1_", "system/gpu_power_w", "lr", "x" * 250)
    ]


def test_tensorboard_that_can_not_be_written_is_a_line_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It writes in a thread of its own, and raises its error in a later call."""
    monkeypatch.setattr(recipient, "RETRY_S", 0.0)
    run = tmp_path / "run"
    with MetricsWriter(run, config=Config(logging=LoggingConfig(tensorboard=True))) as writer:
        writer.step(example(1))
        until((run / "tensorboard").exists)
        run.rename(tmp_path / "moved")
        step, deadline = 2, time.monotonic() + LIMIT_S
        while not (run / "tensorboard").exists():  # until it is opened again
            assert time.monotonic() < deadline
            writer.step(example(step))
            step += 1
            time.sleep(0.001)
    err = capfd.readouterr().err
    assert "TensorBoard failed" in err and "Traceback" not in err
    assert [line["step"] for line in lines(run)] == list(range(2, step))


def test_tensorboard_has_the_same_numbers_and_no_abandoned_future(tmp_path: Path) -> None:
    config = Config(logging=LoggingConfig(tensorboard=True))
    for resume, steps in ((0, (1, 2, 3)), (1, (2,))):
        with MetricsWriter(tmp_path, resume, config) as writer:
            for step in steps:
                writer.step(example(step, loss=float(10 * resume + step)))
    with MetricsWriter(tmp_path, 2, config) as writer:
        writer.step(example(3, loss=33.0))
        writer.rewind(2)
        writer.step(example(3, loss=23.0))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 12.0), (3, 23.0)]
    assert "mfu" not in events.Tags()["scalars"], "nothing is invented where nothing is known"


def test_tensorboard_is_imported_only_when_it_is_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it would now fail
    write_run(tmp_path, range(1, 2))
    assert not (tmp_path / "tensorboard").exists()


class FakeWandb(SimpleNamespace):
    """Records what would be sent."""

    def init(
        self, *, entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None,
        config_exclude_keys=None,
        config_include_keys=None, allow_val_change=None, group=None, job_type=None, mode=None, force=None,
        anonymous=None, reinit=None,
        resume=None, resume_from=None, fork_from=None, save_code=None, tensorboard=None, sync_tensorboard=None,
        monitor_gym=None,
        settings=None,
    ) -> FakeWandb:  # fmt: skip
        """With the keywords of wandb.init; any other ends in a TypeError."""
        self.started.append({name: value for name, value in locals().items() if name != "self"})
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((step, scalars["loss"]))

    def finish(self, exit_code: int) -> None:
        self.finished = True


def test_wandb_resumes_under_one_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb(started=[], logged=[], finished=False, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = Config(logging=LoggingConfig(wandb="proofs"))
    for resume in (0, 1, 0):
        with MetricsWriter(tmp_path / "run", resume, config) as writer:
            writer.step(example(resume + 1, loss=0.5))
    identities = [options["id"] for options in fake.started]
    assert identities[0] == identities[1] != identities[2]
    assert fake.started[0]["project"] == "proofs" and fake.started[0]["config"]["train"]["steps"] == config.train.steps
    assert fake.logged == [(1, 0.5), (2, 0.5), (1, 0.5)] and fake.finished


@pytest.mark.parametrize(
    "options, variables, sent",
    [
        (
            {"wandb": True},
            {},
            {"project": "megalite", "name": "run", "mode": None, "entity": None, "group": None, "tags": None},
        ),
        ({"wandb": True}, {"WANDB_PROJECT": "theirs"}, {"project": "theirs"}),
        ({"wandb": "proofs"}, {"WANDB_PROJECT": "theirs"}, {"project": "proofs"}),
        ({"wandb": "proofs"}, {"WANDB_MODE": "offline"}, {"mode": None}),  # wandb reads the variable itself
        ({"wandb": "proofs", "wandb_mode": "offline"}, {}, {"mode": "offline"}),
        (
            {
                "wandb": True,
                "wandb_entity": "team",
                "wandb_group": "sizes",
                "wandb_tags": ["a", "b"],
                "wandb_name": "first",
            },
            {},
            {"entity": "team", "group": "sizes", "tags": ["a", "b"], "name": "first"},
        ),
        ({"wandb": False}, {}, None),
        ({"wandb": None}, {}, None),
    ],
)
def test_wandb_gets_what_the_options_say(
    options, variables, sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb(started=[], logged=[], finished=False, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with MetricsWriter(tmp_path / "run", 0, Config(logging=LoggingConfig(**options))) as writer:
        writer.step(example(1, loss=0.5))
    if sent is None:
        assert fake.started == []
    else:
        (started,) = fake.started
        assert (
            {name: started[name] for name in sent} == sent
            and started["dir"] == str(tmp_path / "run")
            and fake.logged == [(1, 0.5)]
        )


@pytest.mark.parametrize("value, place", [(True, "run/tensorboard"), ("curves", "curves"), (False, None), (None, None)])
def test_tensorboard_is_a_switch_or_a_directory(value, place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MetricsWriter(Path("run"), 0, Config(logging=LoggingConfig(tensorboard=value))) as writer:
        writer.step(example(1, loss=0.5))
    assert {str(file.parent) for file in Path().glob("**/events.*")} == ({place} if place else set())


def test_a_missing_package_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"logging\.wandb=proofs requires the package wandb.*`pip install 'megalite\[log\]'`",
    ):
        check_packages(LoggingConfig(wandb="proofs"))
    with pytest.raises(ConfigError, match=r"logging\.mlflow=true requires the package mlflow.*megalite\[mlflow\]"):
        check_packages(LoggingConfig(mlflow=True))
    check_packages(LoggingConfig())
