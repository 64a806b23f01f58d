"""metrics.jsonl is exact, complete and consistent with the checkpoint that a run resumes from."""

import json
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.config.sections.logging import LoggingConfig
from megalite.monitoring import metrics, tensorboard_wandb
from megalite.monitoring.metrics import MetricsWriter, StepMetrics, check_packages

FIELDS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "step_time_s",
    "tokens_per_second",
    "tflops_per_gpu",
    "mfu",
    "bubble_fraction",
    "peak_memory_bytes",
    "loss_scale",
    "skipped",
]


def example(step: int, **changes: Any) -> StepMetrics:
    built = StepMetrics(
        step=step,
        loss=math.pi / step,
        grad_norm=1 / 3,
        lr=3e-4,
        tokens=1024,
        step_time_s=0.1,
        tokens_per_second=10240.0,
        tflops_per_gpu=0.5,
        mfu=None,
        bubble_fraction=0.0,
        peak_memory_bytes=2**31,
        loss_scale=1.0,
        skipped=False,
    )
    return replace(built, **changes)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def write_run(run_dir: Path, steps: range, resume_step: int = 0, factor: float = 1.0) -> None:
    with MetricsWriter(run_dir, resume_step) as writer:
        for step in steps:
            writer.step(example(step, loss=factor * step))
            if step % 2 == 0:
                writer.validation(step, factor * step + 0.5)


def test_a_line_has_every_field_in_full_precision(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "run") as writer:
        writer.step(example(7))
        writer.validation(7, 2 / 3, metrics={"rewards/accuracies": 0.5})
        result = lines(tmp_path / "run")  # before the file is closed: a killed run keeps its last step
    assert list(result[0]) == FIELDS
    assert (
        result[0]["step"] == 7
        and result[0]["loss"] == math.pi / 7
        and result[0]["grad_norm"] == 1 / 3
        and result[0]["skipped"] is False
    )
    assert result[1] == {"step": 7, "val_loss": 2 / 3, "val_rewards/accuracies": 0.5}


def test_a_skipped_step_is_still_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.step(example(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    assert lines(tmp_path)[0] | {"loss": None, "grad_norm": None, "skipped": True} == lines(tmp_path)[0]


@pytest.mark.parametrize("resume", [0, 3, 4, 6])
def test_resuming_cuts_what_the_loaded_step_does_not_know(tmp_path: Path, resume: int) -> None:
    write_run(tmp_path, range(1, 7))
    write_run(tmp_path, range(resume + 1, 9), resume, factor=10.0)
    steps = [line for line in lines(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9)), "one line a step"
    assert [line["loss"] for line in steps] == [step * (1.0 if step <= resume else 10.0) for step in range(1, 9)]
    validations = {line["step"]: line["val_loss"] for line in lines(tmp_path) if "val_loss" in line}
    assert validations == {step: step * (1.0 if step <= resume else 10.0) + 0.5 for step in (2, 4, 6, 8)}


def test_a_line_that_a_killed_run_left_unfinished_is_dropped(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 4))
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text[:-20])
    write_run(tmp_path, range(3, 4), resume_step=2)
    assert [line["step"] for line in lines(tmp_path) if "loss" in line] == [1, 2, 3]


def test_a_full_disk_delays_lines_and_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The kernel takes what fits, a part of a line included, and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path) as writer:
        writer.step(example(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, hard))
        try:
            for step in (2, 3, 4):
                writer.step(example(step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert capfd.readouterr().err.count("metrics.jsonl: File too large") == 1
        writer.step(example(5))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_directory_that_vanishes_is_made_again_with_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A write to a removed file succeeds and is lost: nothing but the name tells."""
    run = tmp_path / "run"
    with MetricsWriter(run, config=Config()) as writer:
        writer.step(example(1))
        run.rename(tmp_path / "moved")
        for step in (2, 3):
            writer.step(example(step))
    assert [line["step"] for line in lines(run)] == [2, 3] and [line["step"] for line in lines(tmp_path / "moved")] == [
        1
    ]
    assert (run / "config.yaml").is_file()
    assert capfd.readouterr().err.count("was deleted or moved") == 1


def test_tensorboard_that_can_not_be_written_is_a_line_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It writes in a thread of its own, and raises its error in a later call."""
    monkeypatch.setattr(tensorboard_wandb, "RETRY_S", 0.0)
    run = tmp_path / "run"
    with MetricsWriter(run, config=Config(logging=LoggingConfig(tensorboard=True))) as writer:
        writer.step(example(1))
        run.rename(tmp_path / "moved")
        step, deadline = 2, time.monotonic() + 240
        while not (run / "tensorboard").exists():  # until it is opened again
            assert time.monotonic() < deadline
            writer.step(example(step))
            step += 1
    err = capfd.readouterr().err
    assert "TensorBoard is disabled" in err and "Traceback" not in err
    assert [line["step"] for line in lines(run)] == list(range(2, step))


def test_cutting_replaces_the_file_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, range(1, 7))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        MetricsWriter(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


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
    ) -> "FakeWandb":  # fmt: skip
        """With the keywords of wandb.init; any other ends in a TypeError."""
        self.started.append({name: value for name, value in locals().items() if name != "self"})
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((step, scalars["loss"]))

    def finish(self) -> None:
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
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"logging\.wandb=proofs requires the package wandb.*`pip install wandb`",
    ):
        check_packages(LoggingConfig(wandb="proofs"))
    with pytest.raises(ConfigError, match=r"logging\.tensorboard=true requires the package tensorboard"):
        check_packages(LoggingConfig(tensorboard=True))
    check_packages(LoggingConfig())


MEASURE = """
import torch
from megalite.monitoring.metrics import peak_memory_bytes
before = peak_memory_bytes(torch.device("cpu"))
torch.ones(2**25)  # fp32: 128 MiB
print(peak_memory_bytes(torch.device("cpu")) - before)
"""


def test_peak_memory_grows_with_what_is_used() -> None:
    """In a process whose heap nobody has used, started by one that has held more."""
    held = torch.ones(2**27)  # fp32: 512 MiB, more than torch's import takes
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    del held
    assert 2**26 < int(done.stdout) < 2**28
