"""What ranks learn of each other beside their communication: docs/faults.md."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from megalite.launch import peers
from megalite.launch.peers import Peers, PeerState

SIZE = 3


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Peers]]:
    """Three ranks in one process; another one holds the store."""
    from concurrent.futures import ThreadPoolExecutor

    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    for name, value in {"BEAT_S": 0.05, "SILENT_S": 0.3, "ANSWER_S": 0.5}.items():
        monkeypatch.setattr(peers, name, value)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meet(rank: int) -> Peers:
        own = PrefixStore("run", TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
        return Peers(own, rank, SIZE, lambda: {"step": 3, "runs": 2, "action": f"F0.{rank}"}, None)

    with ThreadPoolExecutor(SIZE) as pool:
        all_peers = list(pool.map(meet, range(SIZE)))
    yield all_peers
    for each in all_peers:
        each.close(left=True)


def until(condition: Any) -> Any:
    """The first true value of a condition."""
    for _ in range(1000):
        if lost := condition():
            return lost
        peers.Event().wait(0.02)
    raise AssertionError("it did not become true")


def end(rank: Peers) -> None:
    """As if its process had ended: no beat, no port."""
    rank.close(left=False)


def silence(ranks: list[Peers], rank: int) -> socket.socket:
    """As if its process were stopped: the kernel still accepts connections."""
    address = ranks[0]._address(rank)
    end(ranks[rank])
    return socket.create_server(("", address[1]))


def test_ranks_that_are_alive_are_found_at_their_places(ranks: list[Peers]) -> None:
    assert len({each.start for each in ranks}) == 1
    state, place = ranks[0].ask(2)
    assert state is PeerState.ANSWERS and place["action"] == "F0.2"
    peers.Event().wait(2 * peers.SILENT_S)
    assert [each.look() for each in ranks] == [None] * SIZE


def test_an_ended_rank_is_known_to_all_that_remain(ranks: list[Peers]) -> None:
    end(ranks[1])
    lost = until(ranks[0].look)  # which watches it
    assert (lost.rank, lost.state, lost.final) == (1, PeerState.ENDED, True) and "step 3, F0.1" in str(lost)
    assert until(lambda: ranks[2].verdict) == lost == ranks[2].origin(1)


def test_a_collective_that_does_not_say_which_rank_is_gone_names_it(ranks: list[Peers]) -> None:
    """As on NCCL. The group is another one than the ranks that watch each other."""
    assert ranks[0].origin(None, (0, 2)) is None and ranks[0].verdict is None  # an error of the network
    end(ranks[2])
    lost = ranks[0].origin(None, (2, 0))
    assert lost is not None and (lost.rank, lost.state) == (2, PeerState.ENDED)
    assert ranks[1].origin(None, (1, 0)) == lost  # rank 0 has lost it


def test_a_rank_that_refuses_and_has_never_answered_is_not_named_by_its_group(ranks: list[Peers]) -> None:
    """A firewall may refuse. The rank that watches it, and has heard it, tells the others."""
    end(ranks[2])
    assert ranks[0].origin(None, (0, 2)) is None and ranks[0].verdict is None
    lost = until(ranks[1].look)
    assert lost.rank == 2 and until(lambda: ranks[0].verdict) == lost


def test_a_rank_that_left_as_planned_is_not_missed(ranks: list[Peers]) -> None:
    ranks[1].close(left=True)
    peers.Event().wait(2 * peers.SILENT_S)
    assert ranks[0].look() is None and ranks[0].look() is None
    end(ranks[2])
    assert until(ranks[0].look).rank == 2, "the one after it is watched"


def test_a_stopped_rank_may_come_back_and_is_no_verdict_of_all(ranks: list[Peers]) -> None:
    with silence(ranks, 1):
        lost = until(ranks[0].look)
        assert (lost.rank, lost.state, lost.final) == (1, PeerState.STOPPED, False)
        assert ranks[0].verdict is None and ranks[2].verdict is None
        assert ranks[0].agree(lost) == lost == until(lambda: ranks[2].verdict), "unless it ends a rank"


def test_another_process_with_the_port_of_an_ended_rank_is_not_taken_for_it(ranks: list[Peers]) -> None:
    port = ranks[0]._address(1)[1]
    end(ranks[1])
    with socket.create_server(("", port)) as other:
        ranks[0]._addresses[1][0] = "127.0.0.1"

        def reply() -> None:
            link, _ = other.accept()
            with link:
                link.sendall(json.dumps({"token": "another", "place": {}}).encode())

        thread = peers.Thread(target=reply)
        thread.start()
        assert ranks[0].ask(1)[0] is PeerState.ENDED
        thread.join()


def test_a_host_that_cannot_be_reached(ranks: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", lost)
    assert ranks[0].ask(1)[0] is PeerState.UNREACHABLE


def test_the_first_of_a_row_of_losses_is_named(ranks: list[Peers]) -> None:
    """Rank 2 has failed; rank 1 has lost it, says so, and ends; rank 0 has lost rank 1."""
    ranks[2].fail("it ran out of memory")
    until(lambda: "failed" in ranks[1].ask(2)[1])
    lost = ranks[1].origin(2)
    end(ranks[2])
    end(ranks[1])
    assert ranks[0].origin(1) == lost is not None
    assert (lost.rank, lost.state) == (2, PeerState.FAILED) and "it ran out of memory" in str(lost)


def test_a_rank_that_is_alive_and_does_not_move_is_named(ranks: list[Peers]) -> None:
    lost = ranks[0].origin(1)
    assert lost is not None and (lost.rank, lost.state) == (1, PeerState.STUCK)
    assert str(lost).startswith("rank 1 is stuck: it is alive but makes no progress; host")
