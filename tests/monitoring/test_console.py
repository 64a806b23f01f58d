"""One line a step for a person, plain and at once where it is piped, with a bar and the time left on a terminal."""

import io
import re
import subprocess
import sys

import pytest

from megalite.monitoring.console import Console
from tests.monitoring.test_metrics import example


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pipe(io.StringIO):
    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def printed_steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"step +(\d+)/\d+  loss", text)]


def run(stream: io.StringIO, steps: int = 10, interval: int = 4, start: int = 0, enabled: bool = True) -> str:
    with Console(steps, interval, start_step=start, enabled=enabled, stream=stream) as console:
        for step in range(start + 1, steps + 1):
            console.step(example(step, loss=1.25, mfu=0.4, skipped=step == 7))
            if isinstance(stream, Pipe):
                assert stream.flushed == stream.getvalue()
        console.validation(steps, 2.5)
    return stream.getvalue()


def test_a_pipe_gets_plain_lines_at_once() -> None:
    text = run(Pipe())
    assert printed_steps(text) == [1, 4, 7, 8, 10], "first, last, every fourth, and the skipped one"
    assert "\x1b" not in text and "\r" not in text
    assert "step  4/10  loss 1.2500  grad norm 0.333  lr 3.00e-04  10.2k tokens/s  0.100 s  mfu 40.0%\n" in text
    assert [line for line in text.splitlines() if "skipped" in line][0].startswith("step  7/10")
    assert text.endswith("step 10/10  validation loss 2.5000\n")


def test_what_keeps_a_step_from_computing_is_shown_where_it_can_be_seen() -> None:
    stream = Pipe()
    with Console(1, stream=stream) as console:
        console.step(example(1), numbers={"time_data_s": 0.0004, "time_communication_s": 0.021, "time_forward_s": 0.03})
    assert stream.getvalue().endswith("0.100 s  communication 21%\n")


def test_a_terminal_gets_the_same_lines_and_a_bar() -> None:
    text = run(Terminal())
    assert printed_steps(text) == [1, 4, 7, 8, 10]
    assert "10/10" in text and "left" in text and "━" in text


def test_a_resumed_run_counts_on() -> None:
    assert printed_steps(run(Pipe(), start=5)) == [6, 7, 8, 10]


@pytest.mark.parametrize("stream", [Pipe, Terminal])
def test_other_ranks_are_silent(stream: type[io.StringIO]) -> None:
    assert run(stream(), enabled=False) == ""


def test_unknown_mfu_is_not_shown_and_bubbles_are() -> None:
    stream = Pipe()
    Console(2, stream=stream).step(example(1, mfu=None, bubble_fraction=0.25))
    assert "mfu" not in stream.getvalue() and "bubble 25%" in stream.getvalue()


def test_rich_is_imported_only_on_a_terminal() -> None:
    code = "import megalite.monitoring.console as c, sys; c.Console(1).close(); sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE).returncode == 0
