"""Console output of a run: one line per step, and on a terminal a progress bar with the remaining time. Only rank 0 prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TextIO

from megalite.messages import say

if TYPE_CHECKING:
    from megalite.monitoring.metrics import StepMetrics


class Console(ExitStack):
    """Prints lines, and below them a progress bar if the stream is a terminal. Lines are flushed at once.

    Args:
        total_steps: number of steps of the whole run.
        interval: print every `interval` steps; the first and the last step and skipped ones are always printed.
        start_step: number of steps completed before this process started.
        enabled: False on every rank but 0.
    """

    def __init__(self, total_steps: int, interval: int = 1, *, start_step: int = 0, enabled: bool = True, stream: TextIO | None = None):
        super().__init__()
        self.total_steps, self.interval, self.start_step, self.enabled = total_steps, interval, start_step, enabled
        self._stream = stream or sys.stdout
        self._bar: Any = _bar(self._stream) if enabled and self._stream.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task("training", total=total_steps, completed=start_step)
            self._bar.start()
            self.callback(self._bar.stop)

    def step(self, metrics: StepMetrics, fault: str | None = None, numbers: Mapping[str, Any] | None = None) -> None:
        """Print a step's line. `fault` says why a step was skipped; `numbers` are further measurements of the step."""
        shown = metrics.step % self.interval == 0 or metrics.step in (self.start_step + 1, self.total_steps) or metrics.skipped
        if shown:
            self.message(self._line(metrics, numbers or {}) + (f"  skipped: {fault}" if metrics.skipped else ""))
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step)

    def validation(self, step: int, loss: float) -> None:
        self.message(f"{self._step(step)}  validation loss {loss:.4f}")

    def message(self, text: str) -> None:
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text, self._stream)

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _line(self, metrics: StepMetrics, numbers: Mapping[str, Any]) -> str:
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
        for phase in ("data", "communication"):  # shown only if they take a visible share of the step
            share = numbers.get(f"time_{phase}_s", 0.0) / metrics.step_time_s
            parts += [f"{phase} {share:.0%}"] if share >= 0.005 else []
        return "  ".join(parts)


def _bar(stream: TextIO) -> Any:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    console = RichConsole(file=stream, force_terminal=True)
    return Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=2, speed_estimate_period=300)


def _thousands(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"
