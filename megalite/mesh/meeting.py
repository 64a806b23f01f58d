"""Barriers of all ranks that tolerate long work on the host.

A save, a load or a disk that flushes may delay one rank for any time.

Communication fails if a rank is later than `run.timeout`: gloo raises, and torch ends a process whose NCCL
collective takes as long. So ranks meet through the rendezvous store first, which neither limits, and
communicate when all have arrived. Meanwhile the watchdog tells whether the others are alive.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING

from megalite.system.activity import Activity

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

SHORTEST_S, LONGEST_S = 1e-3, 0.05  # between two questions
GROWTH = 1.5
MOST_QUESTIONS = 2000  # to the store, a second
LOOK_S = 2.0  # between two looks whether a rank has ended
ENDED = "meeting/ended"
"""The key that a rank sets in a store to say that it joins no further meeting."""


class Late(RuntimeError):
    """Raised if a rank does not reach a meeting in time."""


class Meeting:
    """A barrier of all ranks through a store. Called by one thread at a time, on every rank.

    Args:
        name: name of the meetings; another thread must use another name.
        timeout: seconds to wait for the others where nothing tells whether they are alive
            (`Activity.watched`).
    """

    def __init__(self, name: str, store: Store, rank: int, size: int, activity: Activity, timeout: float):
        self._store, self._size, self._activity, self._timeout = store, size, activity, timeout
        # every rank counts its own in this store: they agree
        self._prefix = f"meeting/{name}/{store.add(f'meeting/{name}/{rank}', 1)}"
        self._count = 0

    def __call__(self) -> None:
        """Wait until all ranks have made this call the same number of times.

        Raises Late, also if a rank has ended, or the store's RuntimeError.
        """
        self._count += 1
        key = f"{self._prefix}/{self._count}"
        if self._store.add(key, 1) == self._size:
            self._store.set(f"{key}/all", "")
            for name in (former := f"{self._prefix}/{self._count - 1}", f"{former}/all"):
                self._store.delete_key(name)  # all have left that one
        looked = started = monotonic()
        pause = SHORTEST_S
        while not self._store.check([f"{key}/all"]):
            if not self._activity.watched and monotonic() - started > self._timeout:
                raise Late(f"some ranks did not arrive after {self._timeout:g} s (run.timeout)")
            if monotonic() - looked > LOOK_S:
                looked = monotonic()
                if self._store.check([ENDED]) and not self._store.check([f"{key}/all"]):
                    raise Late("a rank has ended")
            sleep(pause)
            pause = min(GROWTH * pause, max(LONGEST_S, self._size / MOST_QUESTIONS))


class Meetings:
    """Meetings of all ranks, through the store of the default process group.

    Args:
        timeout: as of `Meeting`; None: torch's.
    """

    def __init__(self, activity: Activity, timeout: timedelta | None):
        self._activity, self._timeout = activity, timeout
        self._by_name: dict[str, Meeting] = {}

    def end(self) -> None:
        """Tell waiting ranks that this rank ends and joins no further meeting."""
        import torch.distributed as dist

        with suppress(RuntimeError):  # the store may be gone
            dist.distributed_c10d._get_default_store().set(ENDED, "")

    def __call__(self, name: str, group: ProcessGroup | None) -> None:
        """Wait for all ranks before a collective over a group that has all of them.

        Collective. Raises a RuntimeError, as the collective would.
        """
        import torch.distributed as dist

        if group is None or dist.get_backend() == "fake":
            return
        if name not in self._by_name:
            store, limit = (
                dist.distributed_c10d._get_default_store(),
                self._timeout or dist.default_pg_timeout,
            )
            self._by_name[name] = Meeting(
                name, store, dist.get_rank(), dist.get_world_size(), self._activity, limit.total_seconds()
            )
        self._by_name[name]()
