"""Ranks meet before a collective that follows work of the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megalite.mesh import meeting
from megalite.mesh.meeting import Late, Meeting
from megalite.system.activity import Activity

SIZE = 3


def ranks(store: HashStore, watched: bool, timeout: float = 60.0) -> list[Meeting]:
    activity = Activity()
    activity.watched = watched
    return [Meeting("world", store, rank, SIZE, activity, timeout) for rank in range(SIZE)]


def test_nobody_leaves_before_the_last_has_come() -> None:
    """Several times, by ranks that come in different orders; a later run in the same store has meetings of its own."""
    arrived, store = Barrier(SIZE), HashStore()
    for came in ([0] * SIZE, [0] * SIZE):

        def rank(number: int, own: Meeting, came: list[int] = came) -> None:
            for turn in range(1, 6):
                Event().wait(0.002 * ((number + turn) % SIZE))
                came[number] = turn
                own()
                assert min(came) >= turn
                arrived.wait(60)

        with ThreadPoolExecutor(SIZE) as pool:
            list(pool.map(rank, range(SIZE), ranks(store, watched=True)))


@pytest.mark.parametrize("watched", [True, False])
def test_a_timeout_counts_only_where_nothing_watches_the_ranks(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others come after hours."""
    clock, each = [0.0], ranks(HashStore(), watched, timeout=600.0)

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 7200:
            for other in each[1:]:
                other._store.add(f"{other._prefix}/1", 1)
            other._store.set(f"{other._prefix}/1/all", "")

    monkeypatch.setattr(meeting, "sleep", sleep)
    monkeypatch.setattr(meeting, "monotonic", lambda: clock[0])
    monkeypatch.setattr(meeting, "LONGEST_S", 100.0)
    if watched:
        each[0]()
    else:
        with pytest.raises(Late, match=r"after 600 s \(run.timeout\)"):
            each[0]()
    assert (clock[0] > 7200) == watched


def test_a_rank_that_has_ended_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog misses nobody who ended as planned, so the meeting must."""
    clock, store = [0.0], HashStore()
    each = ranks(store, watched=True)
    store.set(meeting.ENDED, "")
    monkeypatch.setattr(meeting, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(meeting, "monotonic", lambda: clock[0])
    with pytest.raises(Late, match="a rank has ended"):
        each[0]()
