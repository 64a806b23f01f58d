"""A pool of real gloo ranks that every distributed test shares.

Starting ranks is what makes distributed tests slow, so it is paid once: a fork server imports torch while pytest
collects, ranks are forked from it when first needed and stay, and their process group stays as long as the world size
does (a dispatch then takes under a millisecond). What one process runs alone, such as the reference of a layout, has a
process of its own, so that the group of the others stays. A job that fails or hangs may leave its peers inside a
collective, so the pool then kills all ranks and forks new ones.

This module imports no torch at its top: `start_fork_server` must run before pytest's own import of torch, so that the
two overlap.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TextIO

MAX_WORLD = 8
ALONE = 0  # the generation of every world of one; groups count from 1
PRELOAD = ["torch", "torch.distributed", "numpy", "pytest", "megalite.training.trainer"]
GROUP_TIMEOUT = timedelta(seconds=600)
GRACE_S = 1.0  # time for the other ranks' errors, or for stacks to be written, before the ranks are killed
STACKS = signal.SIGRTMIN  # makes a rank write its stacks; a run handles the other signals
LOG_TAIL = 6000  # characters of a rank's output in an error


class RankError(RuntimeError):
    """A job failed, hung or died on some rank; the message has tracebacks, stacks and output by rank."""


@dataclass
class RankContext:
    """A job's rank and its process's cache.

    Attributes:
        rank, world: as in torch.distributed, which is initialised unless world is 1.
        cache: private to this process and kept while the process group exists: for meshes, which are expensive to make.
    """

    rank: int
    world: int
    cache: dict[Any, Any] = field(default_factory=dict)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """The cached result of `make` for this key and process group. If `make` communicates, all ranks must call this
        alike."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]


def start_fork_server() -> None:
    """Start the import of torch in the process that ranks are forked from; returns at once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


# ---- one rank's process


def _serve(rank: int, pipe: connection.Connection, store_port: int, log_path: str) -> None:
    """Run jobs from the pipe until it closes."""
    log = _redirect_output(log_path)
    faulthandler.enable(log)
    faulthandler.register(STACKS, log, all_threads=True)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    from megalite.launch.process import configure_cpu

    torch.set_num_threads(1)
    configure_cpu()
    _share_one_device()
    _remember_schedules()
    gc.freeze()  # what was imported before the fork: a full collection would traverse it, and copy every page of it
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False, timeout=GROUP_TIMEOUT)
    generation, context = -1, RankContext(rank, 1)
    while True:
        try:
            wanted, world, job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        log.truncate(0)
        try:
            if wanted != generation:
                if dist.is_initialized():
                    dist.destroy_process_group()
                if world > 1:
                    group_store = dist.PrefixStore(f"group{wanted}", store)
                    dist.init_process_group(
                        "gloo", store=group_store, rank=rank, world_size=world, timeout=GROUP_TIMEOUT
                    )
                generation, context = wanted, RankContext(rank, world)
            function, args = pickle.loads(job)
            reply = _dumps((None, function(context, *args)))
        except BaseException:  # every error of a job is reported by the test
            reply = pickle.dumps((traceback.format_exc(), None))
        sys.stdout.flush()
        pipe.send_bytes(reply)


def _share_one_device() -> None:
    """Let all gloo groups of this process use one device.

    Each device has a thread that wakes 100 times a second, and torch makes one for each group: with the groups of all
    cached meshes, eight ranks spent a fifth of the processors' time on that.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    device = ProcessGroupGloo.create_default_device()

    class SharedDeviceGloo(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[misc]


def _remember_schedules() -> None:
    """Keep more schedules than a run needs: tests ask for the same ones again and again, and a rank builds and
    validates those of all."""
    from megalite.assembly import plan

    plan._validated = lru_cache(maxsize=64)(plan._validated.__wrapped__)


def _dumps(reply: Any) -> bytes:
    """Pickle with tensors as arrays of bytes: torch's own way takes ten times longer, and there may be hundreds of
    them."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if type(value) is torch.Tensor and value.device.type == "cpu":
                return _tensor, (value.dtype, value.shape, value.detach().reshape(-1).view(torch.uint8).numpy())
            return NotImplemented

    content = io.BytesIO()
    Pickler(content).dump(reply)
    return content.getvalue()


def _tensor(dtype: Any, shape: Any, content: Any) -> Any:
    import torch

    return torch.from_numpy(content).view(dtype).view(shape)


def _redirect_output(path: str) -> TextIO:
    """Redirect this process's output, including that of C++, to a file that errors quote."""
    log = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    return log


def _exit_with_parent() -> None:
    """End this rank if pytest is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# ---- the pool, in pytest's process


@dataclass
class _Rank:
    process: ForkServerProcess
    pipe: connection.Connection
    log: Path


class RankPool:
    """Up to `MAX_WORLD` ranks that run importable functions together."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._alone: list[_Rank] = []  # the process of worlds of one
        self._generation = 0
        self._world = 0
        self._store: Any = None
        self._logs = tempfile.TemporaryDirectory(prefix="rank_pool_")

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Run `function(context, *args)` on ranks 0 … world - 1 and return their results in rank order.

        Args:
            function: defined at module level, so that the ranks can import it.
            timeout: seconds after which ranks that have not answered count as hanging.

        Raises:
            RankError: with the traceback of every rank that failed, and the stacks of those that hung.
        """
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"world = {world}: the pool has 1 to {MAX_WORLD} ranks")
        job = pickle.dumps((function, args))
        if world not in (1, self._world):
            self._world, self._generation = world, self._generation + 1
        ranks = self._start(world)
        message = pickle.dumps((self._generation if world > 1 else ALONE, world, job))
        try:
            for rank in ranks:
                rank.pipe.send_bytes(message)
            return self._collect(ranks, timeout)
        except BaseException:
            self.stop()
            raise

    def _start(self, world: int) -> list[_Rank]:
        """The processes of a world; those that are missing are forked."""
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        context = multiprocessing.get_context("forkserver")
        ranks, name = (self._ranks, "rank") if world > 1 else (self._alone, "alone")
        for rank in range(len(ranks), world):
            ours, theirs = context.Pipe()
            log = Path(self._logs.name) / f"{name}{rank}.log"
            process = context.Process(target=_serve, args=(rank, theirs, self._store.port, str(log)), daemon=True)
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours, log))
        return ranks[:world]

    def _collect(self, ranks: list[_Rank], timeout: float) -> list[Any]:
        """Wait for every rank's answer; after the first error, wait only briefly for the others."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting: dict[Any, int] = {rank.pipe: number for number, rank in enumerate(ranks)}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = waiting.pop(pipe)
                error, results[number] = _answer(ranks[number])
                if error is not None:
                    errors[number] = error
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            raise RankError(
                "\n".join(f"rank {number} failed:\n{text}{_tail(ranks[number])}" for number, text in errors.items())
            )
        if waiting:
            raise RankError(self._stacks(ranks, sorted(waiting.values()), timeout))
        return [results[number] for number in range(len(ranks))]

    @staticmethod
    def _stacks(ranks: list[_Rank], hanging: Iterable[int], timeout: float) -> str:
        """Make every hanging rank write its stacks."""
        hanging = list(hanging)
        for number in hanging:
            os.kill(ranks[number].process.pid or 0, STACKS)
        time.sleep(GRACE_S)
        stacks = "".join(f"\nrank {number}:{_tail(ranks[number])}" for number in hanging)
        return f"ranks {hanging} have not answered after {timeout:g} s{stacks}"

    def stop(self) -> None:
        """Kill every rank; the next run forks new ones."""
        ranks = self._ranks + self._alone
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
        self._ranks, self._alone, self._world = [], [], 0

    def close(self) -> None:
        self.stop()
        self._logs.cleanup()


def _answer(rank: _Rank) -> tuple[str | None, Any]:
    """A rank's (error, result)."""
    try:
        answer: tuple[str | None, Any] = pickle.loads(rank.pipe.recv_bytes())
        return answer
    except EOFError:
        rank.process.join(timeout=60)
        return f"died with exit code {rank.process.exitcode}\n", None


def _tail(rank: _Rank) -> str:
    """The end of a rank's output in this job."""
    text = rank.log.read_text(errors="replace")[-LOG_TAIL:] if rank.log.exists() else ""
    return f"\n--- its output ---\n{text}" if text else ""
