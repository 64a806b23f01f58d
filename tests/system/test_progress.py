"""How far a command is, on a clock of the test."""

from __future__ import annotations

import io
import sys
import time

import pytest

from megalite.commands.parser import progress_of
from megalite.system.progress import Progress, amount, duration
from megalite.training.checkpointing import rate


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(reports: dict[float, tuple], stream: io.StringIO, **options: object) -> list[str]:
    """What is written when reports arrive at these times, looked at every second."""
    clock = Clock()
    with Progress(stream, clock=clock, **options) as progress:  # type: ignore[arg-type]
        for second in range(36):
            clock.now = 100.0 + second
            if second in reports:
                progress(*reports[second])
            progress.look()
    return stream.getvalue().splitlines()


def test_a_file_gets_the_first_line_after_two_seconds_and_then_one_every_ten():
    reports = {second: ("exporting", second * 100_000_000, 5_000_000_000, "B") for second in range(36)}
    assert shown(reports, io.StringIO()) == [
        "exporting: 200 MB of 5 GB (4%), 100 MB/s, 48 s left",
        "exporting: 1.2 GB of 5 GB (24%), 100 MB/s, 38 s left",
        "exporting: 2.2 GB of 5 GB (44%), 100 MB/s, 28 s left",
        "exporting: 3.2 GB of 5 GB (64%), 100 MB/s, 18 s left",
    ]


def test_a_command_that_is_busy_with_one_thing_still_says_so_and_what_is_slow_has_no_rate_of_zero():
    reports = {0: ("opening a.bin",), 9: ("rows", 0, 300, "rows"), 29: ("rows", 2, 300, "rows")}
    assert shown(reports, io.StringIO()) == [
        "opening a.bin: 2 s elapsed",
        "rows: 0 of 300 rows (0%)",
        "rows: 0 of 300 rows (0%)",
        "rows: 2 of 300 rows (1%), 12 s each, 57 min 7 s left",
    ]


def test_the_rate_of_work_that_continues_counts_what_was_done_now():
    assert (
        shown({0: ("reading", 900, 1000), 2: ("reading", 920, 1000)}, io.StringIO())[0]
        == "reading: 920 of 1,000 (92%), 10/s, 8 s left"
    )


def test_an_unknown_total_has_a_rate_and_no_end():
    assert shown({0: ("searching", 1, None, "layouts"), 2: ("searching", 4_801, None, "layouts")}, io.StringIO())[
        0
    ] == ("searching: 4,801 layouts, 2,400 layouts/s")


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(capsys):
    stream = Terminal()
    lines = "\n".join(shown({0: ("exporting", 0, 400, "B"), 20: ("[red]next", 100, 400, "B")}, stream))
    assert "exporting" in lines and "[red]next" in lines and lines.endswith("\x1b[2K")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("quiet", ["json", "rank"])
def test_nothing_is_shown_beside_json_or_by_other_ranks(quiet, monkeypatch, capsys):
    if quiet == "rank":
        monkeypatch.setenv("RANK", "1")
    progress = progress_of(as_json=quiet == "json")
    clock = progress._clock = Clock()
    progress("exporting", 1, 2)
    clock.now += 1e6
    progress.look()
    assert capsys.readouterr() == ("", "")


def test_the_thread_looks_by_itself(monkeypatch, capsys):
    monkeypatch.setattr("megalite.system.progress.FIRST_S", 0.0)
    monkeypatch.setattr("megalite.system.progress.LOOK_S", 0.001)
    with Progress(sys.stderr) as progress:
        progress("waiting")
        while "waiting" not in (line := capsys.readouterr().err):
            time.sleep(0.001)
    assert line.startswith("waiting: ") and line.endswith(" elapsed\n")


def test_amounts_and_durations_are_readable():
    assert [amount(value, "B") for value in (0, 999, 1000, 1_234_567, 999_600_000, 5.5e12)] == [
        *("0 B", "999 B", "1 kB", "1.23 MB", "1000 MB", "5.5 TB")
    ]
    assert [duration(each) for each in (0.25, 45, 60, 200, 3600, 7500, 273_600)] == [
        *("0.25 s", "45 s", "1 min", "3 min 20 s", "1 h", "2 h 5 min", "3 d 4 h")
    ]


def test_a_save_or_a_load_that_takes_long_tells_its_rate():
    assert rate(12_000_000_000, 6.0) == ", 12,000.0 MB at 2,000.00 MB/s" and rate(12_000_000_000, 4.9) == ""
