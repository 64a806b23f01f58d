"""Watchdog that reports stalled ranks, identifies lost ranks, and ends a run that does not recover.

Its thread only reads what the training thread has stored (`Activity`). Whether other ranks are alive is
determined by `launch.peers`, independently of their communication: on a GPU, a collective with a lost rank
blocks the host forever without raising an error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, main_thread
from time import localtime, monotonic, strftime, time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh, MeshAxis
from megalite.system.activity import Activity, HostWork
from megalite.system.files import replacing
from megalite.system.messages import say

if TYPE_CHECKING:
    from megalite.launch.causes import Lost
    from megalite.launch.peers import LostRank, Peers

LONGEST_LOOK = 10.0  # seconds: the longest interval between two checks of a process alone
# from a lost rank until the watchdog ends this one; failing communication ends it earlier
END_S = 5.0
MARGIN_S = 20.0  # added to run.timeout, so that gloo's communication raises first
NCCL_SHARE = 0.8  # of run.timeout, when torch's watchdog aborts the process without naming a rank
ABORT_S = 5.0  # time to abort the communicators
FRAMES = 12  # number of frames of the training thread in a record
COMPILERS = ("triton.compiler.", "torch._dynamo.convert_frame", "torch._inductor.compile_fx")
"""Modules with a frame on the stack while a kernel or a region of the model is compiled.

This happens at its first call, in any action.
"""


OnLoss = Callable[[str, "Lost"], None]
"""Callback that receives the message of a rank that ends, and the loss that caused it."""


def ignore(message: str, lost: Lost) -> None:
    """`OnLoss` callback of a run without a report."""


class Watchdog:
    """Context manager with a thread that monitors this rank's activity and the other ranks.

    A rank that makes no progress for `train.watchdog` (null: never) is reported once on stderr.
    RUN_DIR/stalls/ then contains the stacks of all threads (rank_NNNNN.txt), the record of the rank for
    `megalite explain` (rank_NNNNN.json), and torch's flight record (collectives_NNNNN.json).

    If the process of a rank has exited, the other ranks end within seconds. If a rank is stopped or
    unreachable, or this rank is waiting for it, they end after `run.timeout` (on NCCL after `NCCL_SHARE` of
    it). Before that, `on_loss` is called with the message and the lost rank.
    """

    def __init__(self, config: Config, mesh: Mesh, run_dir: Path, on_loss: OnLoss = ignore):
        self.mesh, self.activity, self.rank, self.directory = (
            mesh,
            mesh.activity,
            mesh.rank,
            run_dir / run_files.STALLS,
        )
        self.patience = duration_seconds(config.train.watchdog) if config.train.watchdog else None
        self.timeout = duration_seconds(config.run.timeout) or 0
        self.peers: Peers | None = None
        self._on_loss = on_loss
        self._limits = limits(self.timeout, nccl=False)
        self._lost_since: dict[int, float] = {}  # when a rank was first found lost or silent
        self._decided_since: float | None = None  # when this rank first knew a verdict that ends the run
        self._said = False  # whether the current stall has been reported
        self._over = Event()

    def __enter__(self) -> Watchdog:
        if self.mesh.world.size > 1:
            self.peers, nccl = _meet(self.mesh, self._place)
            self._limits = limits(self.timeout, nccl)
            self.activity.watched = True
        if self.patience or self.peers:
            Thread(target=self._watch, name="megalite-watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self.activity.watched = False
        if error is None and self._said:
            self._moves_again()
        if self.peers is not None:
            self._leave(self.peers, error)

    def _leave(self, peers: Peers, error: BaseException | None) -> None:
        """Stop watching, and tell the other ranks why.

        An error caused by a lost rank is attributed to that rank.
        """
        if error is not None:
            self.mesh.meet.end()
        if error is None or raised_on_all_ranks(error, self.activity):
            peers.close(left=True)
        elif hasattr(error, "peer"):
            verdict = peers.origin(error.peer, getattr(error, "group", ()))
            self._record(verdict)
            if verdict is not None:
                error.lost = verdict.lost()  # type: ignore[attr-defined]
        else:
            memory = isinstance(error, torch.OutOfMemoryError)
            peers.fail(
                "it ran out of memory" if memory else f"{type(error).__name__}: {error}".splitlines()[0]
            )

    # ---- the thread

    def _watch(self) -> None:
        seen, since, compiled = None, monotonic(), monotonic()
        interval = min(
            LONGEST_LOOK,
            *([self.patience / 4] if self.patience else []),
            *([self.peers.beat_s] if self.peers else []),
        )
        while not self._over.wait(interval):
            now = tuple(getattr(self.activity, name) for name in Activity.__slots__)
            if now != seen:
                seen, since = now, monotonic()
                if self._said:
                    self._moves_again()
            if _compiles():
                compiled = monotonic()
            stood = monotonic() - since
            if self.patience and not self._said and stood >= self.patience:
                self._said = True
                self._report(stood)
            if self.peers is not None:
                self._look(self.peers, min(stood, monotonic() - compiled))

    def _look(self, peers: Peers, stood: float) -> None:
        """Check the other ranks.

        Ends this rank if another one is lost, or has been silent or waited for too long.
        """
        from megalite.launch.peers import described

        verdict = peers.look()
        if verdict is None:
            self._lost_since.clear()
            if self._awaits() and stood >= self._limits[1]:
                # takes seconds, during which the training thread may have ended the process
                origin = peers.origin(self._place().get("peer"))
                if not self._over.is_set():
                    self._end(
                        origin, f"no progress for {stood:.0f} s (run.timeout), in {described(self._place())}"
                    )
            return
        decided = peers.verdict is not None
        if verdict.rank not in self._lost_since:
            self._lost_since[verdict.rank] = monotonic()
            if not decided:
                say(
                    f"rank {self.rank}: {verdict.described()}; the run ends after run.timeout if "
                    "it does not recover"
                )
        if decided and self._decided_since is None:
            self._decided_since = monotonic()
        silent = monotonic() - self._lost_since[verdict.rank]
        if self._over.is_set():
            return
        if silent >= self._limits[0] or (
            self._decided_since is not None and monotonic() - self._decided_since >= END_S
        ):
            self._end(peers.agree(verdict), f"ends, in {described(self._place())}")

    def _awaits(self) -> bool:
        """Return whether this rank is waiting for another one, with the limit `run.timeout`.

        The host records its own waits. While it executes actions on a GPU, it may wait for the device at any
        point, and the device for another rank. This excludes work of the host alone: `HostWork`,
        `Activity.working`, and compilers.
        """
        activity = self.activity
        if activity.waiting:
            return activity.limited
        own = activity.busy or isinstance(activity.action, HostWork) or _compiles()
        return torch.cuda.is_initialized() and not own

    def _end(self, verdict: LostRank | None, what: str) -> None:
        """End this process, because the training thread is blocked and cannot raise an error."""
        from megalite.launch.causes import Lost
        from megalite.launch.process import exit_after_failure

        message = f"rank {self.rank}: {what}{'' if verdict is None else f' ({verdict})'}"
        lost = Lost() if verdict is None else verdict.lost()
        # _abort is last, because _record reads the communicators
        reports = (lambda: self._record(verdict), lambda: self._on_loss(message, lost), _abort)
        for report in reports:
            with suppress(Exception):  # the process ends regardless of errors
                report()
        exit_after_failure(message, lost=lost)

    # ---- reports

    def _report(self, seconds: float) -> None:
        stacks = self.directory / f"rank_{self.rank:05d}.txt"
        line = (
            f"rank {self.rank}: no progress for {seconds:.0f} s in step {self.activity.step}, "
            f"{self._waits()}; stacks: {stacks}"
        )
        say(line)
        with suppress(OSError):  # a full disk may be the cause of the stall
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(stacks, "a", encoding="utf-8") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        self._record(None)

    def _moves_again(self) -> None:
        """Mark the record of this rank as past, so that it is not used to explain a later hang."""
        self._said, path = False, self.directory / f"rank_{self.rank:05d}.json"
        with suppress(OSError, ValueError):
            _replace(
                path, json.dumps({**json.loads(path.read_text(encoding="utf-8")), "past": True}).encode()
            )

    def _waits(self) -> str:
        """Describe the last action of this rank, the communication it awaits, and when that times out."""
        what, peer, since = self.activity.communication or ("nothing", None, time())
        last = what if peer is None else f"{what}, rank {peer}"
        if not self.activity.waiting:
            return (
                f"last action {self.activity.action}; not waiting for communication (last {last}, "
                f"at {_clock(since)})"
            )
        end = (
            f"run.timeout ends the run at {_clock(since + self.timeout)}"
            if self.activity.limited
            else "no timeout applies, because other ranks are still working"
        )
        return f"last action {self.activity.action}, awaiting {last} since {_clock(since)}; {end}"

    def _place(self) -> dict[str, Any]:
        """Return the position of this rank as plain data, see `launch.peers.Place`."""
        # read once each, because the rank may continue
        activity, plan, action = self.activity, self.activity.plan, self.activity.action
        what, peer, since = activity.communication or (None, None, time())
        number = plan.index(action) if action in plan else None
        place = {
            "step": activity.step,
            "runs": activity.runs,
            "action": str(action),
            "number": number,
            "actions": len(plan),
        }
        return {**place, "since": since, **({"waits": what, "peer": peer} if activity.waiting else {})}

    def _record(self, verdict: LostRank | None) -> None:
        """Write the record for `megalite explain`.

        It contains the position of this rank, what it has started, and what it knows about the other ranks.
        """
        seen = {}
        if self.peers is not None:
            seen = self.peers.followed(self._place().get("peer"), verdict)
        own = {
            "rank": self.rank,
            "host": os.uname().nodename,
            "time": time(),
            "start": self.peers.start if self.peers else "",
        }
        record = {
            **own,
            "place": self._place() | (self.peers.own if self.peers else {}),
            "plan": [str(action) for action in self.activity.plan],
            "axes": {
                axis.name: axis.ranks for axis in vars(self.mesh).values() if isinstance(axis, MeshAxis)
            },
            "traffic": {" ".join(key): count for key, count in dict(self.mesh.traffic).items()},
            "frames": _frames(),
            "seen": seen,
        }
        with suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            _replace(self.directory / f"rank_{self.rank:05d}.json", json.dumps(record).encode())
            _write_flight_record(self.directory / f"collectives_{self.rank:05d}.json")


def limits(timeout: float, nccl: bool) -> tuple[float, float]:
    """Return the time limits for a silent peer and for no progress of this process, in seconds."""
    return (NCCL_SHARE * timeout, NCCL_SHARE * timeout) if nccl else (timeout, timeout + MARGIN_S)


def _meet(mesh: Mesh, place: Callable[[], dict[str, Any]]) -> tuple[Peers, bool]:
    """Connect to the other ranks. Return them, and whether they communicate over NCCL."""
    import torch.distributed as dist

    from megalite.launch.peers import Peers

    store = dist.distributed_c10d._get_default_store()
    # without an agent, rank 0 hosts the store
    held = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    return Peers(store, mesh.rank, mesh.world.size, place, held), dist.get_backend() == "nccl"


def _abort() -> None:
    """Abort the communicators.

    The kernels of NCCL wait for a lost rank forever, and the process cannot exit while they run.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    thread = Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
    thread.start()
    thread.join(ABORT_S)


def _frames() -> list[str]:
    """Return the stack of the training thread, with the innermost frame last."""
    frame = sys._current_frames().get(main_thread().ident or 0)
    return [
        f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}"
        for entry in traceback.extract_stack(frame)[-FRAMES:]
    ]


def _compiles() -> bool:
    """Return whether the training thread is compiling.

    Other threads are ignored, because they may belong to the compilers themselves.
    """
    frame = sys._current_frames().get(main_thread().ident or 0)
    return any(
        str(caller.f_globals.get("__name__")).startswith(COMPILERS)
        for caller, _ in traceback.walk_stack(frame)
        if frame is not None
    )


def raised_on_all_ranks(error: BaseException, activity: Activity) -> bool:
    """Return whether every rank raises this error, so that each ends by itself and none waits for another.

    A DataError is raised on all ranks before the first step, where they check the data together. Later it is
    raised only on the rank that reads the sample.
    """
    from megalite.checkpoint import CheckpointError
    from megalite.config.samples import DataError
    from megalite.parallel.recheck.runtime import CorruptionError
    from megalite.training.bad_steps import FaultLimit

    if isinstance(error, DataError) and activity.step > 0:
        return False
    return isinstance(error, FaultLimit | CorruptionError | CheckpointError | ConfigError)


def _clock(seconds: float) -> str:
    return strftime("%H:%M:%S", localtime(seconds))


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as fresh:
        fresh.write_bytes(content)


def _write_flight_record(path: Path) -> None:
    """Write the record of torch's flight recorder as JSON, of NCCL if available, otherwise of gloo."""
    recorders = torch._C._distributed_c10d
    dump = getattr(recorders, "_dump_nccl_trace_json", None) or getattr(
        recorders, "_dump_fr_trace_json", None
    )
    if dump is not None:
        _replace(path, dump())
