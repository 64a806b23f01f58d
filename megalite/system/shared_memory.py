"""Small messages between the ranks of one host that compute on its CPU: written once, read in place by every
other rank.

A tensor-parallel layer waits for each of its messages, and TCP costs a thread and two copies for each. Here a
file in /dev/shm holds SLOTS messages of each rank of a group. The file is unlinked once all ranks have opened
it, so a run leaves nothing behind however it ends. Semaphores signal that a message is available; readers do
not spin, since ranks may share cores. Sizes, slots and order are known on both sides, because the ranks of a
group call the same operations.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep, time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# messages of a rank that others may not have read yet: layers have at most two collectives in flight
SLOTS = 4
MOST_VIEWS = 256
SLOT_BYTES = 1 << 19  # longer messages go through sockets
_SEMAPHORE_BYTES = 64  # glibc's sem_t has 32
_PATIENCE = 1.0  # seconds between checks whether a silent peer is still alive


class PeerLost(RuntimeError):
    """A rank has ended or timed out. `peer` is its index in the group."""

    def __init__(self, peer: int, reason: str):
        super().__init__(reason)
        self.peer = peer


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory:
    """Shared-memory messages between the ranks of a group on one host. Created by `open`.

    A message is published under a number, 0, 1, … in the order of calls, the same on every rank. It stays
    readable until every rank has released it; numbers may be read and released in any order. `published`
    counts this rank's messages.
    """

    def __init__(self, file: int, rank: int, size: int, timeout: timedelta):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory = mmap.mmap(file, _bytes(size))
        self.rank, self.size, self._timeout = rank, size, timeout.total_seconds()
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        counters, semaphores = size * SLOTS, size * size * _SEMAPHORE_BYTES
        # [reader, slot]: the last number, plus one
        self._released = (ctypes.c_int64 * counters).from_buffer(self._memory, semaphores)
        self._processes = (ctypes.c_int64 * size).from_buffer(self._memory, semaphores + 8 * counters)
        self._slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_control_bytes(size)).view(
            size, SLOTS, SLOT_BYTES
        )
        # of slots, by rank, slot, shape and dtype: a run has few different messages
        self._views: dict[tuple[int, int, torch.Size, torch.dtype], Tensor] = {}
        self.published = 0
        self._seen = [0] * size  # for each rank, the messages whose semaphore this rank has waited for
        self._lives: dict[int, int] = {}
        self._others = [(rank + step) % size for step in range(1, size)]

    @staticmethod
    def open(ranks: tuple[int, ...], group: ProcessGroup, timeout: timedelta) -> SharedMemory | None:
        """Create memory shared by all ranks of a group; None if they are on several hosts.

        Collective over the group.
        """
        rank, size = ranks.index(dist.get_rank()), len(ranks)
        file, path = _create(size) if rank == 0 else (None, None)
        name = [path]
        dist.broadcast_object_list(name, src=ranks[0], group=group)
        if rank > 0 and name[0] is not None:
            with suppress(OSError):
                file = os.open(name[0], os.O_RDWR)
        memory = SharedMemory(file, rank, size, timeout) if file is not None else None
        opened = torch.tensor(float(memory is not None))
        dist.all_reduce(opened, group=group)
        if file is not None:
            os.close(file)  # the mapping stays
        if path is not None:
            os.unlink(path)
        if memory is None or opened < size:
            return None
        memory._introduce(group)
        return memory

    def _introduce(self, group: ProcessGroup) -> None:
        """Initialize this rank's semaphores, and open the processes of the other ranks.

        An open process reports when it exits.
        """
        for writer in self._others:
            self._libc.sem_init(self._semaphore(writer, self.rank), 1, 0)
        self._processes[self.rank] = os.getpid()
        dist.barrier(group=group)
        for peer in self._others:
            # it has ended already, or is hidden from this process: then only the time limit detects it
            with suppress(OSError):
                self._lives[peer] = os.pidfd_open(int(self._processes[peer]))

    def __del__(self) -> None:
        for life in getattr(self, "_lives", {}).values():
            os.close(life)

    def _semaphore(self, writer: int, reader: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + (writer * self.size + reader) * _SEMAPHORE_BYTES)

    def publish(self, x: Tensor) -> int:
        """Make a contiguous tensor readable for the other ranks. Returns its number. Raises PeerLost if its
        slot stays in use."""
        number = self.published
        self.published += 1
        deadline = monotonic() + self._timeout
        for reader in self._others if number >= SLOTS else ():
            while self._released[reader * SLOTS + number % SLOTS] <= number - SLOTS:
                if monotonic() > deadline:
                    raise PeerLost(reader, f"no message was read for {self._timeout:g} s")
                sleep(0)
        self._view(self.rank, number, x).copy_(x)
        for reader in self._others:
            self._libc.sem_post(self._semaphore(self.rank, reader))
        return number

    def _view(self, writer: int, number: int, like: Tensor) -> Tensor:
        key = (writer, number % SLOTS, like.shape, like.dtype)
        if (view := self._views.get(key)) is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            slot = self._slots[writer, number % SLOTS, : like.nbytes]
            view = self._views[key] = slot.view(like.dtype).view(like.shape)
        return view

    def peers(self, number: int, own: Tensor) -> list[Tensor]:
        """Return every rank's message with a number, in rank order.

        These are `own`, and views of the slots of the other ranks, which are valid until `release`.
        """
        for writer in self._others:
            while self._seen[writer] <= number:
                self._await(writer)
                self._seen[writer] += 1
        return [
            own if writer == self.rank else self._view(writer, number, own) for writer in range(self.size)
        ]

    def release(self, number: int) -> None:
        """Allow the other ranks to overwrite their messages of that number."""
        self._released[self.rank * SLOTS + number % SLOTS] = number + 1

    def _await(self, writer: int) -> None:
        """Wait for the next message of a rank. Raises PeerLost."""
        semaphore, deadline = self._semaphore(writer, self.rank), monotonic() + self._timeout
        while True:
            until = time() + _PATIENCE
            if (
                self._libc.sem_timedwait(semaphore, ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9))))
                == 0
            ):
                return
            if monotonic() > deadline:
                raise PeerLost(writer, f"no message within {self._timeout:g} s")
            life = self._lives.get(writer)
            if (
                life is not None
                and select.select([life], [], [], 0)[0]
                and self._libc.sem_trywait(semaphore) != 0
            ):
                raise PeerLost(writer, "its process has ended")


def _control_bytes(size: int) -> int:
    """Return the size of the control block, rounded up to a cache line.

    It contains semaphores [writer, reader], released numbers [reader, slot] and process ids.
    """
    return -(-(size * size * _SEMAPHORE_BYTES + 8 * size * (SLOTS + 1)) // 64) * 64


def _bytes(size: int) -> int:
    return _control_bytes(size) + size * SLOTS * SLOT_BYTES


def _create(size: int) -> tuple[int, str] | tuple[None, None]:
    """Create the file. Returns its descriptor and path, or None if that fails. Its memory is reserved, so a
    full /dev/shm fails here."""
    path = f"/dev/shm/megalite-{os.getpid()}-{os.urandom(6).hex()}"
    with suppress(OSError, AttributeError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, _bytes(size))
            return file, path
        except OSError:
            os.close(file)
            os.unlink(path)
    return None, None
