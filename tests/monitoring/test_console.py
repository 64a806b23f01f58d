"""One line a step for a person, plain and at once where it is piped, with a bar and the time left on a terminal."""

import io
import itertools
import math
import random
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
    clock = itertools.count().__next__  # a second for each step
    with Console(steps, interval, start_step=start, enabled=enabled, stream=stream, clock=clock) as console:
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
    assert (
        "step  4/10  loss 1.2500  grad norm 0.333  lr 3.00e-04  10.2k tokens/s  0.100 s  mfu 40.0%  "
        "40% done  6 s left\n" in text
    )
    assert [line for line in text.splitlines() if "skipped" in line][0].startswith("step  7/10")
    assert text.endswith("step 10/10  validation loss 2.5000  training loss 1.2500\n")


def test_what_keeps_a_step_from_computing_is_shown_where_it_can_be_seen() -> None:
    stream = Pipe()
    with Console(1, stream=stream) as console:
        console.step(example(1), numbers={"time_data_s": 0.0004, "time_communication_s": 0.021, "time_forward_s": 0.03})
    assert stream.getvalue().endswith("0.100 s  communication 21%  100% done\n")


def test_a_terminal_gets_the_same_lines_and_a_bar() -> None:
    text = run(Terminal())
    assert printed_steps(text) == [1, 4, 7, 8, 10]
    assert "10/10" in text and "left" in text and "━" in text
    assert "loss 1.2500  validation 2.5000" in text, "in the bar"


def test_a_resumed_run_counts_on() -> None:
    assert printed_steps(run(Pipe(), start=5)) == [6, 7, 8, 10]


@pytest.mark.parametrize("stream", [Pipe, Terminal])
def test_other_ranks_are_silent(stream: type[io.StringIO]) -> None:
    assert run(stream(), enabled=False) == ""


def test_unknown_mfu_is_not_shown_and_bubbles_are() -> None:
    stream = Pipe()
    accuracy = {"rewards/accuracies": 0.75}
    Console(2, stream=stream).step(example(1, mfu=None, bubble_fraction=0.25), numbers=accuracy)
    assert "mfu" not in stream.getvalue() and "bubble 25%" in stream.getvalue()
    assert "accuracy 75%" in stream.getvalue()
    Console(2, stream=(validated := Pipe())).validation(1, 0.5, metrics=accuracy)
    assert "validation loss 0.5000  accuracy 75%" in validated.getvalue()


def test_rich_is_imported_only_on_a_terminal() -> None:
    code = "import megalite.monitoring.console as c, sys; c.Console(1).close(); sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE).returncode == 0


def test_the_time_left_is_that_of_the_last_steps_and_what_lies_between_them() -> None:
    """Steps of 60 s, then, 100 steps later, of 10 s: only the last count. Before there are two, the step's own time
    does."""
    stream, now = Pipe(), [0.0]
    with Console(1000, stream=stream, clock=lambda: now[0]) as console:
        for step in range(1, 203):
            now[0] += 60.0 if step <= 101 else 10.0
            console.step(example(step, step_time_s=30.0))
    left = [line.rpartition("  ")[2] for line in stream.getvalue().splitlines()]
    assert left[0] == "8 h 19 min left" and left[1] == "16 h 38 min left", "999 · 30 s, 998 · 60 s"
    assert left[-1] == "2 h 13 min left", "798 · 10 s"


def test_tokens_and_epochs_are_shown() -> None:
    stream = Pipe()
    with Console(8, stream=stream, clock=itertools.count().__next__) as console:
        console.step(example(1), numbers={"tokens_seen": 1_234_567_890, "epoch": 0.0123})
        console.step(
            example(2), numbers={"tokens_seen": 2048, "epoch": 2.31, "epoch/data/web": 0.4, "epoch/data/code": 2.31}
        )
    first, second = stream.getvalue().splitlines()
    assert first.endswith("  1.23B tokens  epoch 0.0123  12.5% done  0.7 s left")
    assert second.endswith("  2048 tokens  epoch 2.31 of code  25% done  6 s left")


def marked(
    losses: list[float], interval: int = 1000, stream: io.StringIO | None = None, **metrics: float
) -> dict[int, str]:
    """Step → marker of the lines that a run of these losses prints."""
    stream = stream or Pipe()
    with Console(len(losses) + 1, interval, stream=stream) as console:
        for step, loss in enumerate(losses, 1):
            console.step(example(step, loss=loss, **metrics))
    matches = re.findall(r"step +(\d+)/\d+  loss .*(LOSS SPIKE|LOSS NaN|GRADIENTS NaN)", stream.getvalue())
    return {int(step): marker for step, marker in matches}


def test_a_spike_is_marked_once_whatever_the_interval() -> None:
    """Ten per cent above the median, and five spreads: noise of 0.03 around 2.5, a first step of 11, a jump that stays
    for five steps."""
    noise = random.Random(1)
    losses = [11.0] + [2.5 + noise.gauss(0, 0.03) for _ in range(300)]
    assert marked(losses) == {}
    losses[200:205] = [3.5] * 5
    assert marked(losses) == {201: "LOSS SPIKE"}
    assert marked(losses, interval=1) == dict.fromkeys(range(201, 206), "LOSS SPIKE")
    assert marked([2.5] * 100 + [2.74]) == {} and marked([2.5] * 100 + [2.76]) == {101: "LOSS SPIKE"}
    assert marked([2.5, 3.5] * 100 + [5.0]) == {}, "noise as large as this is ordinary"
    assert marked([2.5] * 19 + [9.0]) == {}, "too few steps to compare with"
    assert marked([10 * math.exp(-step / 100) for step in range(300)]) == {}


def test_a_loss_that_is_not_finite_is_marked_and_red_on_a_terminal() -> None:
    terminal = Terminal()
    assert marked([2.5, math.nan, math.nan, 2.5, math.inf], stream=terminal) == {2: "LOSS NaN", 5: "LOSS NaN"}
    red = [line for line in terminal.getvalue().splitlines() if "\x1b[1;31m" in line and "LOSS" in line]
    assert len(red) == 2 and terminal.getvalue().count("\x1b[1;31m") == 2, "the line, and not the bar below it"
    assert marked([2.5, 2.5], grad_norm=math.nan) == {1: "GRADIENTS NaN"}
    assert marked([2.5, 2.5], grad_norm=math.inf, loss_scale=65536.0) == {}, "fp16 looks for its scale"


def test_a_validation_that_is_not_finite_is_marked() -> None:
    stream = Pipe()
    Console(8, stream=stream).validation(4, math.nan)
    assert stream.getvalue() == "step 4/8  validation loss nan  VALIDATION LOSS NaN\n"
