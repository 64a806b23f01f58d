"""The watchdog: reports where a rank is when it makes no progress. It ends nothing: the process group's timeout (`run.timeout`) does."""

from __future__ import annotations

import faulthandler
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from time import localtime, monotonic, strftime, time

import torch

from megalite.activity import Activity
from megalite.config.amounts import duration_seconds
from megalite.config.schema import Config
from megalite.mesh import Mesh
from megalite.messages import say

LONGEST_LOOK = 10.0  # seconds: the longest interval between two checks


class Watchdog:
    """A context manager with a thread that checks a rank's activity. With `train.watchdog = null` there is no thread.

    A rank that makes no progress for `train.watchdog` is reported once on stderr; the stacks of all threads are written to
    RUN_DIR/stalls/rank_NNNNN.txt, and torch's flight record next to it.
    """

    def __init__(self, config: Config, mesh: Mesh, run_dir: Path):
        self.activity, self.rank, self.directory = mesh.activity, mesh.rank, run_dir / "stalls"
        self.patience = duration_seconds(config.train.watchdog) if config.train.watchdog else None
        self.timeout = duration_seconds(config.run.timeout) or 0
        self._over = Event()

    def __enter__(self) -> Watchdog:
        if self.patience:
            Thread(target=self._watch, args=(self.patience,), name="megalite-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self, patience: float) -> None:
        seen, since, said = None, monotonic(), False
        while not self._over.wait(min(patience / 4, LONGEST_LOOK)):
            now = tuple(getattr(self.activity, name) for name in Activity.__slots__)
            if now != seen:
                seen, since, said = now, monotonic(), False
            elif not said and monotonic() - since >= patience:
                said = True
                self._report(monotonic() - since)

    def _report(self, seconds: float) -> None:
        stacks = self.directory / f"rank_{self.rank:05d}.txt"
        line = f"rank {self.rank}: no progress for {seconds:.0f} s in step {self.activity.step}, {self._place()}; stacks: {stacks}"
        say(line)
        with suppress(OSError):  # a full disk may be the reason for the stall
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(stacks, "a") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
            _write_flight_record(self.directory / f"collectives_{self.rank:05d}")

    def _place(self) -> str:
        """The rank's last action, the communication it awaits, and when that times out."""
        what, peer, since = self.activity.communication or ("nothing", None, time())
        last = what if peer is None else f"{what}, rank {peer}"
        if not self.activity.waiting:
            return f"last action {self.activity.action}; no communication is awaited here (last {last}, at {_clock(since)})"
        end = _clock(since + self.timeout)
        return f"last action {self.activity.action}, awaiting {last} since {_clock(since)}; run.timeout ends that at {end}"


def _clock(seconds: float) -> str:
    return strftime("%H:%M:%S", localtime(seconds))


def _write_flight_record(path: Path) -> None:
    """Write the record of torch's flight recorder, for `torchfrtrace`: NCCL's where this build of torch has it, else gloo's."""
    recorders = torch._C._distributed_c10d
    dump = getattr(recorders, "_dump_nccl_trace", None) or getattr(recorders, "_dump_fr_trace", None)
    if dump is not None:
        path.write_bytes(dump())
