"""`megalite train --nproc N`: starts the ranks of a run on this machine by torchrun's agent, and ends as the
run does.

The agent is the one that torchrun runs: it meets the agents of other nodes, starts the ranks and restarts
them. Around it is what torchrun lacks: signals are forwarded and the ranks get the time to save, the exit
status is the run's, a failure is one line after what the ranks have printed, and a rank that was refused is
not started again. The ranks of an elastic run go on without those that were lost, and stop to go on with more
when places for them have returned; neither counts as a restart.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread, Timer
from typing import Any, Literal

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from megalite.checkpoint.copies import DIRECTORY
from megalite.launch.causes import End, ExitCause, by_cause, lost_in
from megalite.launch.exit_status import END_FILE, ExitStatus, shell_status, training_status
from megalite.launch.local_ranks import package_path
from megalite.launch.memory_directory import memory_directory
from megalite.launch.memory_kills import MemoryKills
from megalite.launch.output import LOGS, RETURN_FILE
from megalite.launch.signals import (
    RESIZE_SIGNAL,
    SIGNALS,
    RepeatedSignal,
    SignalListener,
    end_at_once,
    signal_message,
)
from megalite.launch.slots import LOST_AT, Slots, devices_of
from megalite.system.messages import say
from megalite.system.processes import blocked, marked

MEETING_FAILED = (DistError, RendezvousError, SignalException, OSError)  # no meeting with the other nodes
# the same again after a restart; the rank has said why
REFUSED = (ExitStatus.CONFIGURATION, ExitStatus.IN_USE)
# another job has the directory of the run; a copy may contain what was computed wrong
NOT_SAVED = (ExitStatus.IN_USE, ExitStatus.CORRUPTED)
# a restart would use the device that computes wrong values
NOT_RESTARTED = (*REFUSED, ExitStatus.CORRUPTED)
# before the first step a rank ends at SIGTERM with a status of its own
ENDED_BY_AGENT = (-signal.SIGTERM, -signal.SIGKILL, ExitStatus.STOPPED)
AT_ONCE_S = 5.0  # from a second Ctrl-C to SIGKILL
LAST_CALL_S = 10  # wait for further nodes once there are enough
RESIZE = "megalite/resize"
"""Key in the store of the agents: the ranks were asked to stop so that their number can change."""


@dataclass(frozen=True)
class Launch:
    """A launch of the ranks on this node, and their rendezvous with other nodes.

    Attributes:
        ranks: number of ranks on this machine.
        node_rank: rank of this node; None: nodes are numbered in order of arrival.
        endpoint: HOST:PORT of the rendezvous; None with one node.
        restarts: how often the ranks are restarted after a failure.
        fewest: the smallest number of ranks on this machine with which the run goes on; None: all of them.
        fewest_nodes: the same of nodes.
        used: returns how many ranks of a number on one node the run can use.
        return_after_s: seconds after which a lost place for a rank is tried again.
        patience_s: seconds for the ranks to save and exit after a signal, and for other nodes to arrive.
        newest: returns the newest checkpoint, for the message about a failure.
        save_copies: called once no rank runs any more, with the directory of the copies in memory: saves what
            is newer than the newest checkpoint, and returns lines for the user.
        crashed: called with the exit of each rank and the message, and as keywords their start time and the
            directory with their last lines of output.
    """

    ranks: int
    nodes: int
    node_rank: int | None
    endpoint: str | None
    restarts: int
    patience_s: float
    newest: Callable[[], Path | None]
    save_copies: Callable[[Path], list[str]] = lambda directory: []
    fewest: int | None = None
    fewest_nodes: int | None = None
    used: Callable[[int], int] = lambda ranks: ranks
    return_after_s: float = 0.0
    crashed: Callable[..., None] = lambda ends, reason, **known: None

    @property
    def elastic(self) -> bool:
        """Whether the number of ranks may change."""
        return self.fewest is not None or self.fewest_nodes is not None


def launch(options: Launch, command: Sequence[str]) -> int:
    """Run `python COMMAND …` as this node's ranks. Returns the exit status of the run."""
    logging.disable(logging.CRITICAL)  # the agent's own warnings: everything that matters is said below
    scratch_directory = tempfile.TemporaryDirectory(prefix="megalite_launch_", ignore_cleanup_errors=True)
    with scratch_directory as scratch, memory_directory() as memory:
        end_file = Path(scratch, "end")
        os.environ |= _environment(options, end_file) | memory
        try:
            agent = _Agent(options, command, scratch, end_file, memory.get(DIRECTORY))
        except MEETING_FAILED as error:
            say(f"the ranks could not be started: {error}")
            return int(ExitStatus.FAILED)
        listener = SignalListener(agent.forward, (*SIGNALS, signal.SIGUSR1))
        try:
            return agent.outcome(agent.run())
        except MEETING_FAILED as error:
            say(f"the ranks could not be started: {error}")
            agent.end()
            return int(ExitStatus.FAILED)
        finally:
            agent.finish()
            listener.close()


def _environment(options: Launch, end_file: Path) -> dict[str, str]:
    """Return the environment that the ranks inherit."""
    variables = {
        END_FILE: str(end_file),
        LOGS: str(end_file.parent),
        "PYTHONPATH": package_path(),
        **marked(),
    }
    variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # not those that are forwarded
    if options.ranks > 1:
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if options.nodes > 1:  # else restarted ranks find the addresses of ended ones in the agent's store
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


def _meeting(options: Launch) -> RendezvousParameters:
    """Return the rendezvous of the agents: a fixed store with node ranks, else in order of arrival."""
    job = os.environ.get("SLURM_JOB_ID", "megalite")
    fewest = options.fewest_nodes or options.nodes
    common: dict[str, Any] = {"run_id": job, "min_nodes": fewest, "max_nodes": options.nodes}
    waits: dict[str, Any] = dict.fromkeys(
        ("timeout", "join_timeout", "read_timeout"), int(options.patience_s)
    )
    if fewest < options.nodes:
        waits["last_call_timeout"] = LAST_CALL_S
    if options.nodes == 1:
        common["run_id"] = str(uuid.uuid4())
        return RendezvousParameters("c10d", "localhost:0", **common, local_addr="localhost", **waits)
    if options.node_rank is None:
        return RendezvousParameters("c10d", options.endpoint or "", **common, **waits)
    return RendezvousParameters("static", options.endpoint or "", **common, rank=options.node_rank, **waits)


def _handler(meeting: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of a rendezvous, which the node with the endpoint's address hosts."""
    if meeting.backend == "c10d" and _is_here(meeting.endpoint.rpartition(":")[0]):
        with suppress(RendezvousError):  # another launcher of this machine hosts it
            hosting = copy(meeting)
            hosting.config = meeting.config | {"is_host": True}
            return get_rendezvous_handler(hosting)
    return get_rendezvous_handler(meeting)


def _is_here(host: str) -> bool:
    """Whether a name or address is that of this machine.

    torch compares addresses with that of the machine's name, which may be another one of several, and in
    Kubernetes may not be known yet or be the address of an earlier pod. No node would host the rendezvous.
    """
    if "." in host and host.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))  # possible with an address of this machine only
                return True
    return False


class _Agent(LocalElasticAgent):
    """torchrun's agent, with signals forwarded to the ranks."""

    def __init__(
        self, options: Launch, command: Sequence[str], scratch: str, end_file: Path, memory: str | None
    ):
        meeting = _meeting(options)
        static = meeting.endpoint.rpartition(":") if meeting.backend == "static" else None
        spec = WorkerSpec(
            role="train",
            local_world_size=options.ranks,
            entrypoint=sys.executable,
            args=("-P", *command),  # -P: `-m` would import from the current directory first
            rdzv_handler=_handler(meeting),
            max_restarts=options.restarts,
            monitor_interval=0.1,
            master_addr=static[0] if static else None,
            master_port=int(static[2]) if static else None,
            local_addr=meeting.local_addr,
        )
        super().__init__(spec, DefaultLogsSpecs(log_dir=scratch), shutdown_timeout=int(options.patience_s))
        self.options, self.end_file, self._killed = options, end_file, False
        self._memory = None if memory is None else Path(memory)
        # no rank is there while the nodes meet
        self._phase: Literal["meeting", "running", "ended"] = "meeting"
        self._turn, self._saving = Lock(), Lock()
        self._changed = "; nothing was changed"  # until ranks have been started
        self.pids: list[int] = []
        self.received: list[int] = []
        self._repeated, self._timer = RepeatedSignal(), Timer(0, lambda: None)
        self._ended: dict[int, float] = {}  # ranks that have ended by themselves, and when
        self._ends: list[End] = []  # of all ranks, once one has failed
        self._explained: set[int] = set()  # those that have reported an error that is not of their device
        self._slots = (
            Slots(options.ranks, self._started_of, options.return_after_s, devices_of(options.ranks))
            if options.elastic
            else None
        )
        self._stop_requested = False  # the ranks to stop, so that more can start
        self._too_few = ""

    def _started_of(self, usable: int) -> int:
        """The number of ranks to start on usable places; on several nodes all: the ranks know the layout."""
        return self.options.used(usable) if self.options.nodes == 1 else usable

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.pids = []
        self._enter("meeting")
        if self._slots is not None:
            worker_group.spec.local_world_size = self._slots.start()
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._enter("running")
        self._changed = ""
        self.end_file.unlink(missing_ok=True)
        self.started, self._kills, self._ended, self._ends = time.time(), MemoryKills(), {}, []
        self._stop_requested, self._explained = False, set()
        with blocked((*SIGNALS, RESIZE_SIGNAL)):  # until the ranks have handlers
            started: dict[int, Any] = super()._start_workers(worker_group)
        os.environ.pop(LOST_AT, None)  # of this start alone
        self.pids = list(started.values())
        for number in self.received:  # while they were started
            self._send(number)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._note_ended(worker_group):
            self._look_for_returns()
            return RunResult(WorkerState.HEALTHY)
        self._end_survivors()
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._ends = by_cause([self._end(rank, failure) for rank, failure in result.failures.items()])
            if self.received or self._ends[0].status in NOT_RESTARTED:
                self._remaining_restarts = 0
            elif not self._go_on_without(worker_group) and self._remaining_restarts:
                say(f"{self._ends[0]}; restarting all ranks")
        elif result.state == WorkerState.SUCCEEDED and self._stopped_to_change():
            self._stop_requested = True
            self._restart_workers(worker_group)
            return RunResult(WorkerState.HEALTHY)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # not after a failure: a further start, but no restart
            if self.received:
                return  # the ranks save, and end
            worker_group.spec.max_restarts += 1
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Let the ranks stop at the end of a step if another node has come, before they are terminated."""
        if self._slots is not None and worker_group.state == WorkerState.HEALTHY and not self.received:
            self._ask()
            until = time.monotonic() + self.options.patience_s
            while not self._note_ended(worker_group) and time.monotonic() < until:
                time.sleep(worker_group.spec.monitor_interval)
        super()._stop_workers(worker_group)

    def _end_survivors(self) -> None:
        """Kill the ranks that wait for a killed one, if the run goes on without it: all that they could do is
        report the loss, which takes seconds."""
        if self._slots is None or self.options.fewest is None or self.received:
            return
        processes = [handler.proc for handler in self._handlers()]
        killed = [process for process in processes if (process.poll() or 0) < 0]
        if killed and len(self._slots.usable) - len(killed) >= self.options.fewest:
            for process in processes:
                if process.poll() is None:
                    process.kill()

    def _go_on_without(self, worker_group: WorkerGroup) -> bool:
        """Drop the places of lost ranks of an elastic run, and let torch restart the others without counting
        it. Returns whether the run goes on in this way.

        A rank is lost if it was killed, has ended without a message, or reports an error of its GPU. Other
        errors, and an end of all ranks, fewer ranks would have, too.
        """
        if self._slots is None:
            return False
        own = [end for end in self._ends if end.kind is ExitCause.OWN]
        # ranks that are asked to stop before their first step end with a status of their own
        stopped = (ExitStatus.STOPPED, -RESIZE_SIGNAL) if self._stop_requested else ()
        lost = [end.rank for end in own if end.status not in stopped]
        if any(rank in self._explained for rank in lost):
            return False
        local = [worker.local_rank for worker in worker_group.workers if worker.global_rank in lost]
        if lost or not (self._stop_requested or self.options.nodes > 1):
            left = len(self._slots.usable) - len(local)
            if not local or len(local) == len(worker_group.workers) or self.options.fewest is None:
                return False
            if left < self.options.fewest:
                self._too_few = (
                    f"; {left} of {self.options.ranks} places for ranks are left, fewer than "
                    f"--nproc {self.options.fewest}:{self.options.ranks} allows"
                )
                return False
            self._slots.lose(local)
        os.environ[LOST_AT] = str(time.time())
        worker_group.spec.max_restarts += 1
        self._remaining_restarts += 1  # which torch subtracts again
        say(f"{self._ends[0]}; going on with the other ranks")
        return True

    def _look_for_returns(self) -> None:
        """Ask the ranks to stop once more of them can start."""
        if self._slots is None:
            return
        returned = self.end_file.with_name(RETURN_FILE)
        if injected := returned.exists():
            self._slots.restore()
        if not (self._stop_requested or self.received) and self._slots.grown():
            say("places for ranks have returned; the ranks stop after a step to go on with more")
            self._ask()
        if injected:
            returned.unlink()  # the rank waits for it

    def _ask(self) -> None:
        """Ask the ranks to stop at the end of a step, so that their number can change."""
        if self._stop_requested:
            return
        self._stop_requested = True
        os.environ[LOST_AT] = str(time.time())
        store: Any = self._store
        store.set(RESIZE, "1")  # before they end: the other agents look then
        self._send(RESIZE_SIGNAL)

    def _stopped_to_change(self) -> bool:
        """Whether all ranks have stopped because their number changes, and not for good."""
        if self._slots is None or self.received or not self.end_file.exists():
            return False
        store: Any = self._store
        stopped = self.end_file.read_text(encoding="utf-8") == str(int(ExitStatus.STOPPED))
        return stopped and (self._stop_requested or bool(store.check([RESIZE])))

    def _handlers(self) -> list[SubprocessHandler]:
        """The processes of the ranks, by local rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        return [self._pcontext.subprocess_handlers[rank] for rank in range(len(self.pids))]

    def _note_ended(self, worker_group: WorkerGroup) -> bool:
        """Record when ranks were first seen to have ended. torch's own record has whole seconds, those of
        messages included.

        Returns whether one has failed or all have ended. Only then the agent looks, who ends the others: a
        rank that has ended by itself is always recorded before.
        """
        handlers, statuses = self._handlers(), []
        for worker in worker_group.workers:
            statuses.append(handlers[worker.local_rank].proc.poll())
            if statuses[-1] is not None:
                self._ended.setdefault(worker.global_rank, time.time())
        return any(statuses) or None not in statuses

    def _end(self, rank: int, failure: ProcessFailure) -> End:
        """Describe the exit of a rank from its exit status and its error file."""
        message = failure.error_file_data.get("message")
        content = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        if content and not content.get("device"):
            self._explained.add(rank)
        lost, status, noted = lost_in(content.get("lost")), failure.exitcode, self._ended.get(rank)
        at = float(content.get("written", time.time() if noted is None else noted))
        if lost is not None:
            kind = ExitCause.LOST
        elif noted is None and status in ENDED_BY_AGENT:
            kind = ExitCause.ENDED
        else:
            kind = ExitCause.ABORTED if status == -signal.SIGABRT else ExitCause.OWN
        killed = kind is ExitCause.OWN and status == -signal.SIGKILL and not self._killed
        return End(rank, status, kind, at, lost, self._kills.explanation(failure.pid) if killed else "")

    def _enter(self, phase: Literal["meeting", "running"]) -> None:
        """Begin a phase. The launcher ends if a signal has arrived between two starts of the ranks."""
        with self._turn:
            stop = bool(self.received)
            self._phase = self._phase if stop and phase == "running" else phase
        if stop:
            self._leave()

    def _leave(self) -> None:
        """End at once because of a signal that no rank can act on, after saving what only memory has."""
        number = self.received[0]
        with self._saving:  # until the process ends
            try:
                self._save_copies()
                for directory in (self.end_file.parent, self._memory):
                    shutil.rmtree(directory or "", ignore_errors=True)
            finally:
                line = f"{signal_message(number)} before the first step{self._changed}"
                end_at_once(line, training_status(number))

    def end(self, others_go_on: bool = False) -> None:
        """Begin the last phase, in which no rank is started any more.

        Args:
            others_go_on: whether other nodes go on, which have the copies.
        """
        self._phase = "ended"
        if not others_go_on:
            self._save_copies()

    def _save_copies(self) -> None:
        """Save the newest copy in memory on the disk if no checkpoint is as new. The ranks have ended."""
        refused = bool(self._ends) and self._ends[0].status in NOT_SAVED
        if self._memory is not None and not refused:
            for line in self.options.save_copies(self._memory):
                say(line)

    def forward(self, number: int) -> None:
        """Forward a signal to the ranks, and kill those that do not exit in time.

        Called on the listener's thread.
        """
        again = number == signal.SIGINT and self._repeated.arrived()
        with self._turn:
            first, phase = not self.received, self._phase
            self.received.append(number)
        if phase != "running":
            if again:
                end_at_once(signal_message(number), training_status(number))
            if phase == "meeting":
                Thread(target=self._leave, daemon=True).start()
            return
        if first or again:
            self._timer.cancel()
            self._timer = Timer(AT_ONCE_S if again else self.options.patience_s, self._kill)
            self._timer.daemon = True
            self._timer.start()
        self._send(number)

    def _send(self, number: int) -> None:
        for handler in self._handlers() if self.pids else ():
            handler.proc.send_signal(number)  # not to an ended one, whose number may be that of another

    def _kill(self) -> None:
        self._killed = True
        say("the ranks did not exit in time after the signal (run.timeout); killing them")
        self._send(signal.SIGKILL)

    def finish(self) -> None:
        """Leave the rendezvous."""
        self._timer.cancel()
        if self._slots is not None:
            self._slots.close()
        if self._others_go_on:
            return  # closing the meeting would end them
        with suppress(Exception):  # the store's node may have ended
            self._rdzv_handler.shutdown()

    @property
    def _others_go_on(self) -> bool:
        """Whether the other nodes go on without this one, whose ranks have failed."""
        return self.options.fewest_nodes is not None and bool(self._ends) and not self.received

    def outcome(self, result: RunResult | None) -> int:
        """Return the exit status of the run.

        Saves what only memory has. Prints a line about the failed rank, unless the rank has reported its
        failure itself.
        """
        # a refusal is one of all nodes
        self.end(result is not None and self._others_go_on and self._ends[0].status not in REFUSED)
        if result is None:  # another node has closed the meeting
            say("the other nodes have ended")
            return int(ExitStatus.FAILED)
        if not result.is_failed():
            return (
                int(self.end_file.read_text(encoding="utf-8"))
                if self.end_file.exists()
                else int(ExitStatus.DONE)
            )
        first = self._ends[0]
        if first.status in REFUSED or (
            self.received and (first.status > 0 or -first.status in self.received)
        ):
            return first.status if first.status > 0 else int(training_status(self.received[0]))
        newest = self.options.newest()
        place = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
        line = f"{first}{self._too_few}; {place}"
        say(line)
        failed = {end.rank for end in self._ends}
        others = [
            worker.global_rank
            for worker in self.get_worker_group().workers
            if worker.global_rank not in failed
        ]
        ends = [*self._ends, *(End(rank, 0, ExitCause.ENDED, time.time()) for rank in others)]
        self.options.crashed(ends, line, since=self.started, logs=self.end_file.parent)
        return shell_status(first.status)
