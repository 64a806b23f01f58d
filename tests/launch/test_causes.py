"""Which of several ranks failed first, and whether the kernel killed one for lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from megalite.launch.causes import End, ExitCause, Lost, by_cause, ended, lost_by
from megalite.launch.exit_status import shell_status
from megalite.launch.memory_kills import MemoryKills
from megalite.parallel.collectives import CommunicationError

LATER = 10**13  # microseconds after the kernel's start


def test_kinds_count_before_times_and_times_before_ranks() -> None:
    ends = [
        End(0, 1, ExitCause.LOST, 1.0),
        End(1, -15, ExitCause.ENDED, 0.0),
        End(2, -6, ExitCause.ABORTED, 0.5),
        End(3, -9, ExitCause.OWN, 4.0),
        End(4, 1, ExitCause.OWN, 3.0),
        End(5, -11, ExitCause.OWN, 3.0),
    ]
    assert [end.rank for end in by_cause(ends)] == [4, 5, 3, 2, 0, 1]


@pytest.mark.parametrize(
    "status, said, of_the_launcher",
    [
        (3, "exited with status 3", 3),
        (-9, "was killed by SIGKILL", 137),
        (-11, "was killed by SIGSEGV", 139),
        (-99, "was killed by signal 99", 227),
    ],
)
def test_signals_are_named(status: int, said: str, of_the_launcher: int) -> None:
    assert ended(status) == said and shell_status(status) == of_the_launcher


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def raised_from_none(error: BaseException, handled: BaseException) -> BaseException:
    """An error that stands for itself, although another one was being handled."""
    try:
        try:
            raise handled
        except BaseException:
            raise error from None
    except BaseException as caught:
        return caught


class Named(ValueError):
    lost, peer = "a key", "a server"


FOUND = CommunicationError("all_reduce failed", 3)
FOUND.lost = Lost(3, "rank 3 was lost first")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error, lost",
    [
        (FOUND, Lost(3, "rank 3 was lost first")),
        (CommunicationError("all_reduce failed", None), Lost()),
        (raised(ValueError("x"), CommunicationError("all_reduce failed", 1)), Lost()),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2583"), Lost()),
        (RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"), Lost()),
        (DistNetworkError("recvBytes failed: Connection reset by peer"), Lost()),
        (ConnectionResetError("Connection reset by peer"), None),
        (RuntimeError("http://data/shard: Connection refused"), None),
        (raised_from_none(ValueError("x"), CommunicationError("all_reduce failed", 1)), None),
        (Named("x"), None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (ValueError("x"), None),
        ("a message", None),
    ],
    ids=[
        "named",
        "not named",
        "the cause of another",
        "gloo",
        "NCCL",
        "the store",
        "a file server",
        "data on a server",
        "in place of another",
        "other attributes",
        "CUDA",
        "any other",
        "text",
    ],
)
def test_what_a_lost_rank_has_caused_is_told_from_an_own_error(error: object, lost: Lost | None) -> None:
    assert lost_by(error) == lost


V1, LIMIT = "memory/a/memory.oom_control", "memory/a/memory.failcnt"
KILLED = "-;Out of memory: Killed process 41"


@pytest.mark.parametrize(
    "own, before, after, words",
    [
        pytest.param(
            "0::/j",
            {"j/memory.events": "oom 0\noom_kill 1"},
            {"j/memory.events": "oom 2\noom_kill 2"},
            "memory.events",
            id="a job",
        ),
        pytest.param(
            "0::/",
            {"memory.events": "oom_kill 0"},
            {"memory.events": "oom_kill 2"},
            "may have run out of memory: since the start the kernel killed 2 processes in its container",
            id="a container",
        ),
        pytest.param("0::/j", {"j/memory.events": "oom_kill 1"}, {}, "", id="an old kill"),
        pytest.param(
            "4:memory:/a\n0::/", {V1: "oom_kill 0"}, {V1: "oom_kill 1"}, "memory.oom_control, oom_kill", id="version 1"
        ),
        pytest.param(
            "4:cpu,memory:/a",
            {LIMIT: "7"},
            {LIMIT: "9"},
            "may have run out of memory: since the start its container reached its memory limit (memory.failcnt)",
            id="no count of kills",
        ),
        pytest.param("4:memory:/a", {V1: "oom_kill 0", LIMIT: "7"}, {LIMIT: "9"}, "", id="a limit without a kill"),
        pytest.param(
            "0::/",
            {"log": ""},
            {"log": f"3,1,{LATER},{KILLED} (python)\n"},
            "out of memory, killed by the kernel",
            id="the log",
        ),
        pytest.param("0::/", {"log": ""}, {"log": f"3,1,{LATER},{KILLED}5 (python)\n"}, "", id="another process"),
        pytest.param("0::/", {"log": ""}, {"log": f"3,1,0,{KILLED} (python)\n"}, "", id="an old line"),
        pytest.param("", {}, {}, "", id="nothing to read"),
    ],
)
def test_a_kill_for_lack_of_memory_is_found(
    own: str, before: dict[str, str], after: dict[str, str], words: str, tmp_path: Path
) -> None:
    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    write({"own": own, **before})
    kills = MemoryKills(tmp_path / "own", tmp_path, tmp_path / "log")
    write(after)
    printed = kills.explanation(41)
    assert words in printed and bool(printed) == bool(words)
    assert ("may" in printed) == ("Killed" not in after.get("log", "") and bool(words)), (
        "a counter does not say which process"
    )
