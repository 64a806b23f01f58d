"""The watchdog: says where a rank is when it gets nowhere. It ends nothing: the process group's time-out (`run.timeout`) does that."""

from __future__ import annotations

import faulthandler
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import localtime, monotonic, strftime

import torch

from megalite.activity import Activity

LONGEST_LOOK = 10.0  # seconds between two looks


class Watchdog:
    """A thread that looks at a rank's activity while it is entered as a context.

    Args:
        patience: seconds without progress after which it speaks, once per stall; None: it never does, and there is no thread.
        timeout: seconds after which a communication fails.
        directory: for stacks, and torch's record of the last collectives.
    """

    def __init__(self, activity: Activity, rank: int, patience: float | None, timeout: float, directory: Path):
        self.activity, self.rank, self.patience, self.timeout, self.directory = activity, rank, patience, timeout, directory
        self._over = Event()
        self._thread = Thread(target=self._watch, name="megalite-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.patience is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.patience is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self.patience is not None
        seen, since, said = None, monotonic(), False
        while not self._over.wait(min(self.patience / 4, LONGEST_LOOK)):
            now = (self.activity.step, self.activity.action, self.activity.communication, self.activity.waiting)
            if now != seen:
                seen, since, said = now, monotonic(), False
            elif not said and monotonic() - since >= self.patience:
                said = True
                self._report(monotonic() - since)

    def _report(self, seconds: float) -> None:
        stacks = self.directory / f"rank_{self.rank:05d}.txt"
        line = f"rank {self.rank}: no progress for {seconds:.0f} s in step {self.activity.step}, {self._place()}; stacks: {stacks}"
        print(line, file=sys.stderr, flush=True)
        with suppress(OSError):  # a disk that is full may be why nothing moves
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(stacks, "a") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            _write_flight_record(self.directory / f"collectives_{self.rank:05d}")

    def _place(self) -> str:
        """Where the rank is, and when that ends."""
        activity = self.activity
        if activity.communication is None:
            return f"last action {activity.action}; no communication was awaited here yet"
        what, peer, since = activity.communication
        whom = what if peer is None else f"{what}, rank {peer}"
        if not activity.waiting:
            return f"last action {activity.action}; no communication is awaited here (the last one: {whom}, at {_clock(since)})"
        end = _clock(since + self.timeout)
        return f"last action {activity.action}, awaiting {whom} since {_clock(since)}; run.timeout ends that at {end}"


def _clock(seconds: float) -> str:
    return strftime("%H:%M:%S", localtime(seconds))


def _write_flight_record(path: Path) -> None:
    """torch's flight recorder, for `torchfrtrace`: NCCL's where this build of torch has it, else the one of gloo."""
    recorders = torch._C._distributed_c10d
    dump = getattr(recorders, "_dump_nccl_trace", None) or getattr(recorders, "_dump_fr_trace", None)
    if dump is not None:
        path.write_bytes(dump())
