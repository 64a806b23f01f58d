"""metrics.jsonl is exact, complete and consistent with the checkpoint that a run resumes from."""

import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.schema import Config
from megalite.monitoring.metrics import MetricsWriter, StepMetrics

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


def test_cutting_replaces_the_file_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, range(1, 7))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        MetricsWriter(tmp_path, 3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


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
