"""The watchdog: says where a rank is when it makes no progress, names a rank that is lost, and ends the
others when it does not return.

Its thread only reads what the training thread has stored (`Activity`). Whether other ranks are alive it
learns from `launch.peers`, which does not need their communication: on a GPU, a collective with a lost rank
blocks the host forever and raises nothing.
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
# from a lost rank to the end of this one by the watchdog; communication that fails ends it earlier
END_S = 5.0
MARGIN_S = 20.0  # beyond run.timeout: gloo's communication has raised before
NCCL_SHARE = 0.8  # of run.timeout: torch's watchdog then aborts the process without a name
ABORT_S = 5.0  # for the communicators to abort
FRAMES = 12  # of the training thread's stack in a record
COMPILERS = ("triton.compiler.", "torch._dynamo.convert_frame", "torch._inductor.compile_fx")
"""Modules that have a frame in the stack while a kernel or a region of the model is compiled: at its first
call, in any action."""


OnLoss = Callable[[str, "Lost"], None]
"""Called with the message of a rank that ends, and with what it has lost."""


def ignore(message: str, lost: Lost) -> None:
    """The `OnLoss` of a run that leaves no report."""


class Watchdog:
    """A context manager with a thread that checks a rank's activity, and with several ranks that of the
    others.

    A rank that makes no progress for `train.watchdog` (null: never) is reported once on stderr.
    RUN_DIR/stalls/ gets the stacks of all threads (rank_NNNNN.txt), the rank's record, which `megalite
    explain` reads (rank_NNNNN.json), and torch's flight record (collectives_NNNNN.json).

    A rank whose process has ended ends the others within seconds. One that is stopped or cannot be reached,
    or for which this rank waits, does so after `run.timeout` (on NCCL `NCCL_SHARE` of it). `on_loss` is
    called with the message before, and with what was lost.
    """

    def __init__(self, config: Config, mesh: Mesh, run_dir: Path, on_loss: OnLoss = ignore):
        self.mesh, self.activity, self.rank, self.directory = (
            mesh,
            mesh.activity,
            mesh.rank,
            run_dir / "stalls",
        )
        self.patience = duration_seconds(config.train.watchdog) if config.train.watchdog else None
        self.timeout = duration_seconds(config.run.timeout) or 0
        self.peers: Peers | None = None
        self._on_loss = on_loss
        self._limits = limits(self.timeout, nccl=False)
        self._lost_since: dict[int, float] = {}  # when a rank was first found lost or silent
        self._decided_since: float | None = None  # when a verdict that ends the run was first known here
        self._said = False  # whether the present stall is reported
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
        """End the watch, and tell the others why. What a lost rank has caused gets the name of that rank."""
        if error is not None:
            self.mesh.meet.end()
        if error is None or raised_on_all_ranks(error, self.activity):
            peers.close(left=True)
        elif hasattr(error, "peer"):
            verdict = peers.origin(error.peer)
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
        """Look at the other ranks; end this one if one of them is lost, or has been silent or waited for too
        long."""
        from megalite.launch.peers import described

        verdict = peers.look()
        if verdict is None:
            self._lost_since.clear()
            if self._awaits() and stood >= self._limits[1]:
                # takes seconds: meanwhile the training thread may have ended the process
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
                    f"rank {self.rank}: {verdict.described()}; run.timeout ends the run if it does not return"
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
        """Whether this rank waits for another one, in a way that `run.timeout` limits.

        It says so where its host does. Where that works on a GPU's actions it may wait for the device
        anywhere, and the device for another rank; but not where it works on its own: `HostWork`,
        `Activity.working`, compilers.
        """
        activity = self.activity
        if activity.waiting:
            return activity.limited
        own = activity.busy or isinstance(activity.action, HostWork) or _compiles()
        return torch.cuda.is_initialized() and not own

    def _end(self, verdict: LostRank | None, what: str) -> None:
        """End this process: the training thread waits for something that does not come, and nothing can be
        raised in it."""
        from megalite.launch.causes import Lost
        from megalite.launch.process import exit_after_failure

        message = f"rank {self.rank}: {what}{'' if verdict is None else f' ({verdict})'}"
        lost = Lost() if verdict is None else verdict.lost()
        # the first before the last: it reads them
        reports = (lambda: self._record(verdict), lambda: self._on_loss(message, lost), _abort)
        for report in reports:
            with suppress(Exception):  # the process ends in any case
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
        with suppress(OSError):  # a full disk may be the reason for the stall
            self.directory.mkdir(parents=True, exist_ok=True)
            with open(stacks, "a", encoding="utf-8") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        self._record(None)

    def _moves_again(self) -> None:
        """Mark this rank's record as past: it would explain a later hang wrongly."""
        self._said, path = False, self.directory / f"rank_{self.rank:05d}.json"
        with suppress(OSError, ValueError):
            _replace(
                path, json.dumps({**json.loads(path.read_text(encoding="utf-8")), "past": True}).encode()
            )

    def _waits(self) -> str:
        """The rank's last action, the communication it awaits, and when that times out."""
        what, peer, since = self.activity.communication or ("nothing", None, time())
        last = what if peer is None else f"{what}, rank {peer}"
        if not self.activity.waiting:
            return (
                f"last action {self.activity.action}; no communication is awaited here (last {last}, at "
                f"{_clock(since)})"
            )
        end = (
            f"run.timeout ends that at {_clock(since + self.timeout)}"
            if self.activity.limited
            else "without a limit: others still work"
        )
        return f"last action {self.activity.action}, awaiting {last} since {_clock(since)}; {end}"

    def _place(self) -> dict[str, Any]:
        """Where this rank is, as plain data: `launch.peers.Place`."""
        # each once: the rank may go on meanwhile
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
        """Write what `megalite explain` reads: this rank's place, what it has started, and what it knows of
        the others."""
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
    """Seconds until this process ends because another one is silent, and because it makes no progress
    itself."""
    return (NCCL_SHARE * timeout, NCCL_SHARE * timeout) if nccl else (timeout, timeout + MARGIN_S)


def _meet(mesh: Mesh, place: Callable[[], dict[str, Any]]) -> tuple[Peers, bool]:
    """Meet the other ranks. Returns them, and whether they communicate over NCCL."""
    import torch.distributed as dist

    from megalite.launch.peers import Peers

    store = dist.distributed_c10d._get_default_store()
    # without an agent, rank 0 holds it
    held = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    return Peers(store, mesh.rank, mesh.world.size, place, held), dist.get_backend() == "nccl"


def _abort() -> None:
    """Abort the communicators: NCCL's kernels wait for a lost rank forever, and the process does not end
    while they run."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    thread = Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
    thread.start()
    thread.join(ABORT_S)


def _frames() -> list[str]:
    """The training thread's stack, the innermost frame last."""
    frame = sys._current_frames().get(main_thread().ident or 0)
    return [
        f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}"
        for entry in traceback.extract_stack(frame)[-FRAMES:]
    ]


def _compiles() -> bool:
    """Whether the training thread is in a compiler. Only there: the others are often the compilers' own."""
    frame = sys._current_frames().get(main_thread().ident or 0)
    return any(
        str(caller.f_globals.get("__name__")).startswith(COMPILERS)
        for caller, _ in traceback.walk_stack(frame)
        if frame is not None
    )


def raised_on_all_ranks(error: BaseException, activity: Activity) -> bool:
    """Whether every rank raises this error, so that each ends by itself and none waits for another.

    A DataError is raised on all ranks before the first step, where they check the data together; later it
    belongs to the rank that reads a sample.
    """
    from megalite.checkpoint import CheckpointError
    from megalite.config.samples import DataError
    from megalite.training.bad_steps import FaultLimit

    if isinstance(error, DataError) and activity.step > 0:
        return False
    return isinstance(error, FaultLimit | CheckpointError | ConfigError)


def _clock(seconds: float) -> str:
    return strftime("%H:%M:%S", localtime(seconds))


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as fresh:
        fresh.write_bytes(content)


def _write_flight_record(path: Path) -> None:
    """Write the record of torch's flight recorder as JSON: NCCL's where this build of torch has it, else
    gloo's."""
    recorders = torch._C._distributed_c10d
    dump = getattr(recorders, "_dump_nccl_trace_json", None) or getattr(
        recorders, "_dump_fr_trace_json", None
    )
    if dump is not None:
        _replace(path, dump())
