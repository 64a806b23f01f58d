"""crash.md: what is known about a run that has failed, without what nobody should paste."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.commands.start_ranks import report_failure
from megalite.config import run_files
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.launch import crash, output
from megalite.launch.agent import Launch, launch
from megalite.launch.causes import End, ExitCause, Lost, by_cause
from megalite.launch.memory_kills import MemoryKills
from megalite.system.activity import Activity
from megalite.training.job import Job
from megalite.training.summary import SummaryWriter, launcher_failed

SECRET = "hunter2-token"
RANKS = """
import os, signal, sys, time
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
from megalite.launch.output import outlive_readers
outlive_readers()
rank = os.environ["RANK"]
for step in range(100):
    print(f"step {step} of rank {rank}", flush=True)
if rank == "0":
    time.sleep(60)
time.sleep(0.3)
print("Segmentation fault", file=sys.stderr, flush=True)
os.kill(os.getpid(), 11)
"""


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What a launcher changes for itself and its ranks."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    logging.disable(logging.NOTSET)


def configuration(directory: Path, **sections: dict) -> Config:
    model = {"preset": "tiny", "vocab_size": 257}
    return from_dict(
        {"model": model, "run": {"dir": str(directory), "name": "run"}, "optimizer": {"lr": 7e-5}, **sections}
    )


def failed(config: Config, rank: int = 0, reason: str = "it broke", since: float = 0.0, **options: Any) -> str:
    activity = Activity()
    activity.step = 17
    activity.enter("B2.0")
    activity.wait_for("all_reduce over dp", 3)
    crash.rank_failed(config, rank, reason, activity=activity, since=since, **options)
    return (config.run.directory / run_files.CRASH).read_text()


def section(report: str, heading: str) -> str:
    return report.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_it_says_why_where_and_on_what_and_which_options_were_changed(tmp_path):
    report = failed(configuration(tmp_path), reason="the disk | broke", trace="Traceback (most recent call last): x")
    assert "the disk | broke" in section(report, "Reason") and "Traceback" in section(report, "Rank 0: traceback")
    row = next(line for line in report.splitlines() if line.startswith("| 0 |"))
    assert r"the disk \| broke" in row and "step 17, B2.0, awaiting all_reduce over dp, rank 3 since " in row
    options = yaml.safe_load(
        section(report, "Options that differ from the defaults").strip().strip("`").removeprefix("yaml")
    )
    assert options["optimizer"] == {"lr": 7e-5} and "train" not in options
    assert "MemTotal" in section(report, "Memory") and "torch" in section(report, "Environment")


def test_environment_values_are_left_out_except_known_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    report = failed(configuration(tmp_path, network={"variables": {"HF_TOKEN": SECRET, "NCCL_ALGO": "Ring"}}))
    assert SECRET not in report and "WANDB_API_KEY" not in report
    assert "NCCL_DEBUG: WARN" in report and "NCCL_ALGO: Ring" in report and "HF_TOKEN: not shown" in report


def test_text_of_the_run_can_not_end_a_block(tmp_path):
    report = failed(configuration(tmp_path), reason="```\n# not a heading\n````")
    assert section(report, "Reason").strip().startswith("`````\n```\n# not a heading")


def test_ranks_without_a_launcher_write_one_report_together(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    config = configuration(tmp_path)
    failed(config, 3, "rank 3 was first")
    others = [
        threading.Thread(target=failed, args=(config, rank, f"rank {rank} lost rank 3")) for rank in (0, 1, 2, 4, 5)
    ]
    for each in others:
        each.start()
    for each in others:
        each.join()
    report = (config.run.directory / run_files.CRASH).read_text()
    assert "rank 3 was first" in section(report, "Reason") and "lost" not in section(report, "Reason")
    assert rows(config) == [f"| {rank} |" for rank in range(6)]


def rows(config: Config) -> list[str]:
    report = (config.run.directory / run_files.CRASH).read_text()
    return [line[:5] for line in section(report, "Ranks").splitlines() if line[2:3].isdigit()]


def test_a_rank_with_an_older_report_does_not_replace_that_of_all(tmp_path, monkeypatch):
    """Both have the same process number, as in containers on two hosts. Rank 0 composes its report before rank 1 has
    failed, and writes it when rank 1 has written its own, but not replaced crash.md yet."""
    config, real = configuration(tmp_path), crash.replacing
    composed, written, also_written, replaced = (threading.Event() for _ in range(4))
    writers = iter(["older", "newer"])

    @contextmanager
    def replacing(path: Path, fresh: Path) -> Iterator[Path]:
        writer = next(writers, "") if path.name == run_files.CRASH else ""
        if writer == "older":
            composed.set()
            assert written.wait(60)
        with real(path, fresh) as place:
            yield place
            if writer == "newer":
                written.set()
                assert also_written.wait(60)
            elif writer == "older":
                also_written.set()
                assert replaced.wait(60)

    monkeypatch.setattr(crash, "PATIENCE_S", 60.0)
    monkeypatch.setattr(crash, "replacing", replacing)
    older = threading.Thread(target=failed, args=(config, 0))
    older.start()
    assert composed.wait(60)
    failed(config, 1)
    replaced.set()
    older.join()
    assert rows(config) == ["| 0 |", "| 1 |"]


def test_a_rank_that_is_killed_leaves_the_report_of_those_that_failed_meanwhile(tmp_path, monkeypatch):
    """The launcher kills the others soon after the first failure, here after the rank has replaced crash.md."""
    config, real_report, real_replacing = configuration(tmp_path), crash.report, crash.replacing

    def report(config: Config, parts: Sequence[crash.RankReport], reason: str | None) -> str:
        text = real_report(config, parts, reason)
        if len(parts) == 1:
            failed(config, 1)
        return text

    @contextmanager
    def replacing(path: Path, fresh: Path) -> Iterator[Path]:
        with real_replacing(path, fresh) as place:
            yield place
        if path.name == run_files.CRASH:
            raise RuntimeError("killed")

    monkeypatch.setattr(crash, "report", report)
    monkeypatch.setattr(crash, "replacing", replacing)
    failed(config, 0)
    assert rows(config) == ["| 0 |", "| 1 |"]


def test_two_launchers_record_the_end_at_the_same_time(tmp_path, monkeypatch, capsys):
    """The one of the rank that failed first, and the one of rank 0."""
    config, real = configuration(tmp_path), Path.write_text
    config.parallel.dp = 1
    SummaryWriter(config)
    reasons = iter(["the second"])

    def write_text(path: Path, *arguments: Any, **options: Any) -> int:
        size = real(path, *arguments, **options)
        for reason in reasons:
            launcher_failed(config, 1, reason, since=0.0)
        return size

    monkeypatch.setattr(Path, "write_text", write_text)
    launcher_failed(config, 1, "the first", since=0.0)
    assert json.loads((config.run.directory / "summary.json").read_text())["reason"] == "the first"
    assert capsys.readouterr().err == ""


def test_parts_of_an_earlier_job_are_not_of_this_failure(tmp_path):
    config = configuration(tmp_path)
    failed(config, 1, "yesterday")
    report = failed(config, 0, "today", since=time.time())
    assert "yesterday" not in report and "today" in report


def test_the_first_rank_is_reported_although_many_others_wrote_before(tmp_path):
    config = configuration(tmp_path)
    for rank in range(crash.MOST_PARTS + 1):
        failed(config, rank, "the connection was lost", lost=Lost())
    ends = [
        End(99, -7, ExitCause.OWN, time.time()),
        *(End(rank, 1, ExitCause.LOST, time.time(), Lost()) for rank in range(crash.MOST_PARTS + 1)),
    ]
    crash.launcher_failed(config, ends, "rank 99 was killed by SIGBUS", since=0.0, logs=tmp_path)
    report = (config.run.directory / run_files.CRASH).read_text()
    assert (
        "| 99 |" in section(report, "Ranks")
        and section(report, "Reason").strip("`\n") == "rank 99 was killed by SIGBUS"
    )


def test_of_several_nodes_the_first_to_fail_gives_the_reason(tmp_path, monkeypatch):
    config = configuration(tmp_path)
    monkeypatch.setenv(output.LOGS, str(tmp_path))  # under a launcher, which writes the report
    for host, rank, reason, lost in (
        ("node1", 12, "all_reduce failed", Lost()),
        ("node0", 13, "it ran out of memory", None),
    ):
        crash.rank_failed(config, rank, reason, activity=Activity(), since=0.0, lost=lost)
        part = config.run.directory / run_files.CRASH_PARTS / f"rank_{rank:05d}.json"
        part.write_text(json.dumps({**json.loads(part.read_text()), "host": host}))
    end = End(12, 1, ExitCause.LOST, time.time(), Lost())
    crash.launcher_failed(config, [end], "rank 12 exited with status 1", since=0.0, logs=tmp_path)
    report = (config.run.directory / run_files.CRASH).read_text()
    assert section(report, "Reason").strip("`\n").splitlines()[0] == "it ran out of memory"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["its launcher last", "its launcher first"])
def test_two_launchers_agree_on_the_rank_that_was_killed(order, tmp_path, monkeypatch):
    """Rank 3 of the second node is killed; the others lose it, and know nothing but that it has ended."""
    config = configuration(tmp_path)
    lost = Lost(
        3,
        "rank 3 was lost first: its process has ended; host node1, last known in step 8, B0.0",
        "node1",
        "step 8, B0.0",
    )
    monkeypatch.setenv(output.LOGS, str(tmp_path))
    for rank in range(3):
        crash.rank_failed(config, rank, f"rank {rank}: all_reduce failed", activity=Activity(), since=0.0, lost=lost)
    nodes = [
        [End(rank, 1, ExitCause.LOST, time.time(), lost) for rank in (0, 1)],
        [End(3, -9, ExitCause.OWN, time.time()), End(2, 1, ExitCause.LOST, time.time(), lost)],
    ]
    for node in order:
        line = f"{by_cause(nodes[node])[0]}; there is no checkpoint"
        first = crash.launcher_failed(config, nodes[node], line, since=0.0, logs=tmp_path)
    report = (config.run.directory / run_files.CRASH).read_text()
    assert (first.rank, first.status, first.reason) == (3, -9, "rank 3 was killed by SIGKILL")
    assert section(report, "Reason").strip("`\n").splitlines()[0].startswith("rank 3 was killed by SIGKILL")
    row = next(line for line in report.splitlines() if line.startswith("| 3 |"))
    assert "was killed by SIGKILL" in row and row.endswith("| step 8, B0.0 |"), "where it was is known from the others"


@pytest.mark.parametrize("skew", [-600.0, 600.0], ids=["the other host's clock is behind", "ahead"])
def test_clocks_of_hosts_do_not_tell_which_rank_failed_first(skew, tmp_path, monkeypatch):
    """Rank 3 of node b is killed, and rank 0 of node a, whose clock differs, loses it; rank 1 fails by itself in
    consequence."""
    config, began = configuration(tmp_path), time.time()
    (tmp_path / "job").write_text("this job")
    summary = config.run.directory / "summary.json"
    SummaryWriter(config, "this job")
    lost = Lost(3, "rank 3 was lost first: its process has ended", os.uname().nodename, "step 8, B0.0")
    for rank, own in ((0, lost), (1, None)):
        crash.rank_failed(
            config, rank, f"rank {rank} broke", activity=Activity(), since=began - 1, job="this job", lost=own
        )
        part = config.run.directory / run_files.CRASH_PARTS / f"rank_0000{rank}.json"
        part.write_text(json.dumps(json.loads(part.read_text()) | {"host": "a"}))
    clock = began + skew
    monkeypatch.setattr(crash.time, "time", lambda: clock)
    os.utime(summary, (began, began))
    report_failure(
        config, [End(3, -9, ExitCause.OWN, clock)], "rank 3 was killed by SIGKILL", since=clock - 1, logs=tmp_path
    )
    report = (config.run.directory / run_files.CRASH).read_text()
    assert section(report, "Reason").strip("`\n") == "rank 3 was killed by SIGKILL"
    assert rows(config) == ["| 0 |", "| 1 |", "| 3 |"]
    content = json.loads(summary.read_text())
    assert (content["state"], content["exit_status"], content["reason"]) == (
        "failed",
        137,
        "rank 3 was killed by SIGKILL",
    )


@pytest.mark.parametrize("silent", [True, False])
def test_without_a_launcher_the_others_say_which_rank_was_lost(silent, tmp_path, monkeypatch):
    """A rank that has said why it ends was not killed."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    config, kills = configuration(tmp_path), MemoryKills()
    monkeypatch.setattr(
        kills, "explanation", lambda pid=None: "out of memory, the kernel killed 1 process of its container"
    )
    lost = Lost(2, "rank 2 was lost first: its process has ended", os.uname().nodename, "step 8, B0.0", silent)
    for rank in range(2):
        report = failed(config, rank, f"rank {rank}: all_reduce failed, rank 2 is gone", lost=lost, kills=kills)
    expected = (
        "rank 2 was lost first: its process has ended"
        + "; out of memory, the kernel killed 1 process of its container" * silent
    )
    assert section(report, "Reason").strip("`\n") == expected
    assert f"| 2 | {os.uname().nodename} | {expected} | step 8, B0.0 |" in report


@pytest.mark.parametrize("trained", [True, False])
def test_the_launcher_writes_how_the_run_ended_for_ranks_that_could_not(trained, tmp_path):
    config, began = configuration(tmp_path), time.time()
    config.parallel.dp = 1
    ends = [End(2, -11, ExitCause.OWN, began), End(0, 1, ExitCause.LOST, began, Lost(2, "rank 2 was lost first"))]
    summary = config.run.directory / "summary.json"
    SummaryWriter(config)
    if not trained:
        os.utime(summary, (began - 60, began - 60))  # of an earlier start
    report_failure(config, ends, "rank 2 was killed by SIGSEGV; there is no checkpoint", since=began - 1, logs=tmp_path)
    content = json.loads(summary.read_text())
    expected = ("failed", 139, "rank 2 was killed by SIGSEGV") if trained else ("running", None, None)
    assert (content["state"], content["exit_status"], content["reason"]) == expected


def test_a_run_that_trains_again_keeps_the_report_under_another_name(tmp_path):
    config = configuration(tmp_path)
    failed(config)

    class Lock:
        def release(self) -> None: ...

    Job(config, Lock()).running(0)  # type: ignore[arg-type]
    assert sorted(path.name for path in config.run.directory.iterdir()) == ["crash.previous.md", "summary.json"]


@pytest.mark.parametrize("trouble", ["full", "hangs"])
def test_a_disk_that_is_full_or_does_not_answer_hides_no_error(trouble, tmp_path, monkeypatch, capsys):
    def write(*_: object) -> None:
        if trouble == "full":
            raise OSError(28, "No space left on device")
        threading.Event().wait()

    monkeypatch.setattr(crash, "PATIENCE_S", 0.05)
    monkeypatch.setattr(crash, "_replace", write)
    crash.rank_failed(configuration(tmp_path), 0, "it broke", activity=Activity(), since=0.0)
    assert capsys.readouterr() == ("", "")


def test_the_launcher_has_the_last_lines_of_ranks_that_were_killed(tmp_path, capfd):
    config = configuration(tmp_path)
    reports: list[str] = []

    def crashed(ends: list[End], reason: str, **known: object) -> None:
        crash.launcher_failed(config, ends, reason, **known)  # type: ignore[arg-type]
        reports.append((config.run.directory / run_files.CRASH).read_text())

    assert launch(Launch(2, 1, None, None, 0, 60.0, newest=lambda: None, crashed=crashed), ["-c", RANKS]) == 128 + 11
    report = reports[0]
    assert "rank 1 was killed by SIGSEGV; there is no checkpoint" in section(report, "Reason")
    lines = section(report, "Rank 1: last lines of output").splitlines()
    assert "Segmentation fault" in lines and "step 99 of rank 1" in lines and "step 10 of rank 1" not in lines
    assert report.index("## Rank 1: last") < report.index("## Rank 0: last"), "the first to fail is first"
    assert "step 99 of rank 0" in section(report, "Rank 0: last lines of output")
    assert "crash.md for details" in capfd.readouterr().err


def test_the_file_of_a_rank_stays_small_and_has_the_end(tmp_path):
    recent = output.Recent()
    recent.keep_in(tmp_path / "rank_7.log")
    for number in range(40_000):
        recent.add(f"line {number}\n".encode())
    size = (tmp_path / "rank_7.log").stat().st_size
    assert size <= 17 * output.KEPT and output.log_of(tmp_path, 7)[-3:] == [
        f"line {number}" for number in (39997, 39998, 39999)
    ]
    assert recent.lines()[-1] == "line 39999" and output.log_of(tmp_path, 8) == []
    assert json.dumps(recent.lines())
