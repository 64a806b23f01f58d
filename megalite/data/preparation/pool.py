"""Encoding of tasks in one or several processes, with the results in the order of the tasks.

Workers receive the tokenizer once, and tasks, which name what to read; they return tokens. At most
TASKS_AHEAD tasks per worker are in flight, so that memory is bounded for any input.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

from megalite.data.indexed import DataError
from megalite.data.preparation.encoded import Encoded
from megalite.data.preparation.tasks import Task
from megalite.data.tokenizer.tokenizers import Tokenizer
from megalite.system.processes import blocked, watch_parent

TASKS_AHEAD = 4
BYTES_PER_WORKER = 4 << 20  # of input, below which starting a process costs more than it saves
QUIET = "ignore:resource_tracker:UserWarning"
"""Option -W of the process in which Python removes semaphores.

Ctrl-C may leave some semaphores of the pool to it, which would cause warnings.
"""


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
    if QUIET not in sys.warnoptions:
        sys.warnoptions.append(QUIET)
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer, encoder),
    )
    ahead: deque[Future[Encoded]] = deque()
    try:
        for task in tasks:
            # the first task starts the workers, which leave Ctrl-C to this process
            with blocked([signal.SIGINT]):
                ahead.append(pool.submit(_encode, task))
            if len(ahead) > TASKS_AHEAD * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool:
        way_out = "Run the command again with fewer --workers to continue from this point."
        raise WorkerLost(
            f"one of {workers} workers was killed, probably because the machine ran out of memory. {way_out}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: list[tuple[Tokenizer, Encoder]] = []  # of this process, if it is a worker


def _start_worker(tokenizer: Tokenizer, encoder: Encoder) -> None:
    watch_parent()
    _worker.append((tokenizer, encoder))


def _encode(task: Task) -> Encoded:
    tokenizer, encoder = _worker[0]
    return encoder.encode(task, tokenizer)
