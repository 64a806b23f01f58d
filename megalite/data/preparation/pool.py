"""Encoding of tasks in one or several processes, with the results in the order of the tasks.

Workers receive the tokenizer once, and tasks, which name what to read; they return tokens. At most
TASKS_AHEAD tasks per worker are in flight, so that memory is bounded for any input.

A worker may be killed at any time: for lack of memory, or by a signal to the whole process group. Each
therefore has a pipe of its own to this process, which ends with the worker, even in the middle of a result.
With a queue that all workers write to, as in ProcessPoolExecutor, the rest of that result would be awaited
forever. This process uses no threads or locks here, which an interrupt could leave in any state.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Thread
from traceback import format_exc
from typing import Protocol

from megalite.data.indexed import DataError
from megalite.data.preparation.encoded import Encoded
from megalite.data.preparation.tasks import Task
from megalite.data.tokenizer.tokenizers import Tokenizer
from megalite.system.processes import blocked, watch_parent

TASKS_AHEAD = 4
BYTES_PER_WORKER = 4 << 20  # of input, below which starting a process costs more than it saves


class Encoder(Protocol):
    """Converts tasks; sent to every worker."""

    def encode(self, task: Task, tokenizer: Tokenizer) -> Encoded: ...


class WorkerLost(DataError):
    """Raised if a worker was killed. The preparation can be resumed."""


def default_workers(size: int) -> int:
    """Return the number of usable cores, or fewer for little input."""
    return max(1, min(usable_cores(), size // BYTES_PER_WORKER))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encoded(tasks: Iterator[Task], tokenizer: Tokenizer, encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Yield the results of the tasks in order.

    Raises DataError of a task, or WorkerLost.
    """
    if workers == 1:
        yield from (encoder.encode(task, tokenizer) for task in tasks)
        return
    pool = EncoderPool(tokenizer, encoder, workers)
    try:
        for task in tasks:
            pool.send(task)
            if pool.ahead > TASKS_AHEAD * workers:
                yield pool.result()
        while pool.ahead:
            yield pool.result()
    finally:
        pool.close()


@dataclass(frozen=True)
class EncoderProcess:
    """A worker, this process's end of its pipe, and the numbers of the tasks that it has not answered yet, in
    the order of its answers."""

    process: BaseProcess
    pipe: Connection
    unanswered: deque[int] = field(default_factory=deque)


class EncoderPool:
    """Workers, which are started when there are tasks for them.

    Raises WorkerLost from every method but `close` once a worker has ended.
    """

    def __init__(self, tokenizer: Tokenizer, encoder: Encoder, workers: int):
        self._tokenizer, self._encoder, self._most = tokenizer, encoder, workers
        self._workers: list[EncoderProcess] = []
        self._answers: dict[int, Encoded | Exception] = {}  # by the number of the task
        self._sent = self._taken = 0

    @property
    def ahead(self) -> int:
        """Number of tasks that were sent and whose results were not taken."""
        return self._sent - self._taken

    def send(self, task: Task) -> None:
        """Send a task to the worker with the fewest tasks, or to a new one if none is idle."""
        self._receive(timeout=0)
        if len(self._workers) < self._most and all(worker.unanswered for worker in self._workers):
            self._start()
        worker = min(self._workers, key=lambda worker: len(worker.unanswered))
        # waits at most for the task that the worker encodes: it reads the next one before it sends the answer
        with self._lost():
            worker.pipe.send(task)
        worker.unanswered.append(self._sent)
        self._sent += 1

    def result(self) -> Encoded:
        """Return the result of the next task, or raise its error."""
        while self._taken not in self._answers:
            self._receive()
        answer = self._answers.pop(self._taken)
        self._taken += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Kill the workers. They have nothing to clean up."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, its = context.Pipe()
        process = context.Process(target=_work, args=(its,), daemon=True)
        resource_tracker.ensure_running()  # otherwise `start` does it, and unblocks SIGINT
        with blocked([signal.SIGINT]):  # workers leave Ctrl-C to this process
            process.start()
            self._workers.append(EncoderProcess(process, ours))
        its.close()  # before anything is written: then a worker that has ended is noticed
        with self._lost():
            ours.send((self._tokenizer, self._encoder))

    def _receive(self, timeout: float | None = None) -> None:
        """Receive an answer of each worker that has one, after waiting for the first."""
        workers = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(workers), timeout):
            assert isinstance(pipe, Connection)
            with self._lost():
                answer = pipe.recv_bytes()
            self._answers[workers[pipe].unanswered.popleft()] = pickle.loads(answer)

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Context manager around the use of a pipe, which fails if the worker has ended."""
        try:
            yield
        except (EOFError, OSError):
            way_out = "Run the command again with fewer --workers to continue from this point."
            raise WorkerLost(
                f"one of {self._most} workers was killed, probably because the machine ran out of memory. "
                f"{way_out}"
            ) from None


# ---- in a worker


def _work(pipe: Connection) -> None:
    """Encode tasks until this process is killed."""
    watch_parent()
    answers = SimpleQueue[bytes]()
    with suppress(EOFError, OSError):  # the parent has ended
        tokenizer, encoder = pipe.recv()
        # a thread, because the parent may be sending a task, and receives nothing meanwhile
        Thread(target=_send, args=(answers, pipe), daemon=True).start()
        while True:
            answers.put(_answer(pipe.recv(), tokenizer, encoder))


def _send(answers: SimpleQueue[bytes], pipe: Connection) -> None:
    with suppress(OSError):  # the parent has ended
        while True:
            pipe.send_bytes(answers.get())


def _answer(task: Task, tokenizer: Tokenizer, encoder: Encoder) -> bytes:
    """Return the pickled result of a task, or its error."""
    try:
        return pickle.dumps(encoder.encode(task, tokenizer), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        error.add_note(format_exc())  # pickle drops the traceback
        return pickle.dumps(error)
