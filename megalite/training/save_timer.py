"""Saves by time, for runs without `checkpoint.interval`: every `checkpoint.minutes`, and less often where a save takes long.

Clocks of ranks differ, so rank 0's alone counts: it asks for a save as a signal asks for the end (`signals`), and every rank learns it with
the same step's gradient norm.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from megalite.checkpoint.directories import TIMED_KEPT
from megalite.config.schema import CheckpointConfig, Config
from megalite.planning.states import checkpoint_bytes
from megalite.training.signals import SAVE, asks_to_save

if TYPE_CHECKING:
    from megalite.training.trainer import StepResult

SHARE = 0.05  # of the time at most for saves: one that takes a second is followed by at least 19 without one


class SaveTimer:
    """When a run saves by time.

    Args:
        asks: whether this rank may ask for a save: rank 0 alone.
        clock: seconds from any start.
    """

    def __init__(self, options: CheckpointConfig, asks: bool, clock: Callable[[], float]):
        self._every = 60 * options.minutes if asks and options.interval is None and options.minutes is not None else None
        self._clock = clock
        self._last, self._pause, self._saved = clock(), self._every or 0.0, -1

    @property
    def value(self) -> float:
        """What this rank adds to the sum of requests."""
        return SAVE if self._every is not None and self._clock() - self._last >= self._pause else 0.0

    def due(self, results: Sequence[StepResult]) -> bool:
        """Whether to save now, from the results that have become known: the same on every rank. What was asked for in a step that the last
        save has is done."""
        return any(asks_to_save(result.stop) and result.step > self._saved for result in results)

    def saved(self, step: int, seconds: float) -> None:
        """Take in a save after a step, for whatever reason, which has held training for some seconds."""
        self._saved, self._last = step, self._clock()
        self._pause = max(self._every or 0.0, seconds * (1 / SHARE - 1))


def describe(config: Config) -> str:
    """When the run saves, what it keeps, and how much that is, in a line."""
    options, size = config.checkpoint, checkpoint_bytes(config)
    kept = f"the newest {options.keep} are kept" if options.keep is not None else "all are kept"
    if options.interval is not None:
        when = f"every {options.interval:,} steps"
    elif options.minutes is not None:
        when = f"every {options.minutes:g} minutes (checkpoint.minutes)"
        kept = kept if options.keep is not None else f"the newest {TIMED_KEPT} of these are kept"
    else:
        return "no checkpoint before the end or a signal: checkpoint.interval and checkpoint.minutes are null"
    return f"a checkpoint {when}, about {_bytes(size)} each; {kept}{_little_room(config, size)}"


def _little_room(config: Config, size: float) -> str:
    """A warning, if the disk has less room than the checkpoints that are kept together with the next one."""
    options = config.checkpoint
    most = options.keep or (TIMED_KEPT if options.interval is None else 1)
    with suppress(OSError):
        free = shutil.disk_usage(config.run.directory).free
        if free < (most + 1) * size:
            return f". {config.run.directory} has {_bytes(free)} free, and {most + 1} of them need {_bytes((most + 1) * size)}"
    return ""


def _bytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
