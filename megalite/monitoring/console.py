"""Console output of a run: one line per step, and a progress bar on a terminal. Only rank 0 prints.

A line about a loss that is not finite, or that spikes, ends with a marker, is printed regardless of the
interval, and is red on a terminal.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from math import isfinite
from pathlib import PurePath
from statistics import median
from time import monotonic
from typing import Any, TextIO

from megalite.monitoring.metrics import MEMBER, REWARDS, StepMetrics
from megalite.system.messages import say
from megalite.system.progress import duration

PACE_STEPS = 100
"""Number of recent steps from which the remaining time is estimated."""
SPIKE_WINDOW, SPIKE_MINIMUM = 50, 20
"""Number of recent losses that a loss is compared with, and the minimum required for a comparison."""
SPIKE_SPREADS, SPIKE_RISE = 5.0, 0.1
"""Thresholds of a spike.

A spike exceeds the median of the recent losses by more than 5 times their spread (from the median to the 90th
percentile) and by more than 10 %.
"""


class Console(ExitStack):
    """Console that prints lines, with a progress bar below them if the stream is a terminal.

    Lines are flushed immediately.

    Args:
        total_steps: number of steps of the whole run.
        interval: print every `interval` steps; the first, the last and skipped steps are always printed.
        start_step: number of steps completed before this process started.
        enabled: False on all ranks except 0.
        clock: time in seconds, from which the remaining time is estimated.
    """

    def __init__(
        self,
        total_steps: int,
        interval: int = 1,
        *,
        start_step: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = monotonic,
    ):
        super().__init__()
        self._clock, self._times = clock, deque[float](maxlen=PACE_STEPS + 1)
        self._watch, self._marked = LossWatch(), False
        self._losses: dict[str, float] = {}
        self.total_steps, self.interval, self.start_step, self.enabled = (
            total_steps,
            interval,
            start_step,
            enabled,
        )
        self._stream = stream or sys.stdout
        self._bar: Any = _bar(self._stream) if enabled and self._stream.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=total_steps, completed=start_step)
            self._bar.start()
            self.callback(self._bar.stop)

    def step(
        self, metrics: StepMetrics, fault: str | None = None, numbers: Mapping[str, Any] | None = None
    ) -> None:
        """Print the line of a step.

        Args:
            fault: the reason why the step was skipped.
            numbers: further measurements of the step.
        """
        self._times.append(self._clock())
        marker = self._watch.marker(metrics)
        begins, self._marked = marker != "" and not self._marked, marker != ""
        shown = (
            metrics.step % self.interval == 0
            or metrics.step in (self.start_step + 1, self.total_steps)
            or metrics.skipped
        )
        if shown or begins:
            parts = [
                *self._parts(metrics, numbers or {}),
                marker,
                f"skipped: {fault}" if metrics.skipped else "",
            ]
            self.message("  ".join(filter(None, parts)), alarm=marker != "")
        self._show("loss", metrics.loss, metrics.step)

    def validation(
        self,
        step: int,
        loss: float,
        by_set: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Print the line of a validation, with the losses by set and the last training loss.

        Args:
            metrics: those of the objective.
        """
        sets = (f"{name} {value:.4f}" for name, value in (by_set or {}).items())
        beside = f"training loss {self._losses['loss']:.4f}" if "loss" in self._losses else ""
        marker = "" if isfinite(loss) else "VALIDATION LOSS NaN"
        self.message(
            "  ".join(
                filter(
                    None,
                    [
                        self._step(step),
                        f"validation loss {loss:.4f}",
                        *sets,
                        *_accuracy(metrics or {}),
                        beside,
                        marker,
                    ],
                )
            ),
            alarm=marker != "",
        )
        self._show("validation", loss, step)

    def _show(self, name: str, loss: float, step: int) -> None:
        """Show a loss in the progress bar, next to the others."""
        self._losses[name] = loss
        if self._bar is not None:
            losses = "  ".join(f"{name} {value:.4f}" for name, value in self._losses.items())
            self._bar.update(self._task, completed=step, description=losses)

    def message(self, text: str, alarm: bool = False) -> None:
        """Print a line, in red on a terminal if `alarm` is set."""
        if not self.enabled:
            return
        if self._bar is not None:
            from rich.text import Text

            # a style of print would also color the bar below it
            line = Text(text, style="bold red" if alarm else "")
            self._bar.console.print(line, soft_wrap=True)
        else:
            say(text, self._stream)

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _parts(self, metrics: StepMetrics, numbers: Mapping[str, Any]) -> list[str]:
        parts = [
            self._step(metrics.step),
            f"loss {metrics.loss:.4f}",
            f"grad norm {metrics.grad_norm:.3f}",
            f"lr {metrics.lr:.2e}",
            f"{_thousands(metrics.tokens_per_second)} tokens/s",
            f"{metrics.step_time_s:.3f} s",
        ]
        if metrics.mfu is not None:
            parts.append(f"mfu {metrics.mfu:.1%}")
        if metrics.bubble_fraction is not None and metrics.bubble_fraction >= 0.005:
            parts.append(f"bubble {metrics.bubble_fraction:.0%}")
        parts += _accuracy(numbers)
        if (loss := numbers.get("indexer_loss")) is not None:
            parts.append(f"indexer loss {loss:.4f}")
        for phase in ("data", "communication"):  # only shown if they take a visible fraction of the step
            share = numbers.get(f"time_{phase}_s", 0.0) / metrics.step_time_s
            parts += [f"{phase} {share:.0%}"] if share >= 0.005 else []
        return [
            *parts,
            *_read(numbers),
            f"{1000 * metrics.step // self.total_steps / 10:g}% done",
            *self._left(metrics),
        ]

    def _left(self, metrics: StepMetrics) -> list[str]:
        """Estimate the remaining time from the recent steps, including validations and saves.

        Before there are two steps, the time of the first one is used.
        """
        steps = self.total_steps - metrics.step
        pace = (
            (self._times[-1] - self._times[0]) / (len(self._times) - 1)
            if len(self._times) > 1
            else metrics.step_time_s
        )
        return [f"{duration(steps * pace)} left"] if steps else []


class LossWatch:
    """Detector of losses that are not finite or that spike.

    Losses are compared with the median of the recent ones, which is robust to noise and single outliers.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def marker(self, metrics: StepMetrics) -> str:
        """Return the marker of a step, or an empty string if it is ordinary.

        Overflowing gradients are ordinary while the fp16 loss scale is being adjusted.
        """
        if not isfinite(metrics.loss):
            return "LOSS NaN"
        if not isfinite(metrics.grad_norm) and metrics.loss_scale == 1:
            return "GRADIENTS NaN"
        last = sorted(self._losses)
        self._losses.append(metrics.loss)
        if len(last) < SPIKE_MINIMUM:
            return ""
        middle = median(last)
        # five of them are more than six standard deviations of normal noise
        spread = last[9 * len(last) // 10] - middle
        if metrics.loss - middle <= max(SPIKE_SPREADS * spread, SPIKE_RISE * abs(middle)):
            return ""
        return f"LOSS SPIKE (median of the last {len(last)} steps: {middle:.4f})"


def _read(numbers: Mapping[str, Any]) -> list[str]:
    """Describe the data read so far: tokens, and epochs of the most repeated member of a blend."""
    if "tokens_seen" not in numbers:
        return []
    members = {name: epoch for name, epoch in numbers.items() if name.startswith(MEMBER)}
    of = f" of {PurePath(max(members, key=lambda name: members[name])).name}" if members else ""
    lines = [f"{_thousands(numbers['tokens_seen'])} tokens"]
    if (epoch := numbers.get("epoch")) is not None:
        lines.append(f"epoch {epoch:.{2 if epoch >= 0.1 else 4}f}{of}")
    return lines


def _bar(stream: TextIO) -> Any:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
    )
    console = RichConsole(file=stream, force_terminal=True)
    return Progress(
        *columns, TimeRemainingColumn(), console=console, refresh_per_second=2, speed_estimate_period=300
    )


def _accuracy(numbers: Mapping[str, Any]) -> list[str]:
    """Return the share of the pairs whose chosen completion has the higher reward, if known."""
    accuracy = numbers.get(f"{REWARDS}accuracies")
    return [] if accuracy is None else [f"accuracy {accuracy:.0%}"]


def _thousands(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"
