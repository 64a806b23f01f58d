"""Starts a command on several ranks of this machine, without torchrun.

The first rank to fail ends the others, and its exit status is the command's: bad input found by a rank is one
message, without a launcher's report around it. Ranks share the terminal; their rendezvous store is in the
process that started them. They end with it, and ignore Ctrl-C: it interrupts the process that started them,
which ends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import megalite
from megalite.launch.causes import ended
from megalite.launch.exit_status import shell_status
from megalite.launch.memory_kills import MemoryKills
from megalite.system.processes import blocked, marked

_PACKAGE_ROOT = str(Path(megalite.__file__).resolve().parents[1])
POLL_S, GRACE_S = 0.05, 5.0  # between polls of the ranks; from SIGTERM to SIGKILL


def run_ranks(
    count: int,
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    poll: Callable[[], object] = lambda: None,
    patience: float = 0.0,
) -> int:
    """Run `python COMMAND …` as ranks 0 … count − 1. Returns 0, or the status of the first rank that failed.

    Args:
        variables: added to the ranks' environment, which is this process's.
        output: the file for stdout and stderr of all ranks; default: the terminal.
        poll: called every now and then while they run; they end if it raises.
        patience: seconds in which the others may end by themselves after one has failed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks, kills = list[subprocess.Popen[bytes]](), MemoryKills()
    try:
        for rank in range(count):
            own = _environment(rank, count, store.port) | dict(variables or {})
            # -P: `-m` would import from the current directory first, where a user's file may have the name of
            # a package.
            with blocked([signal.SIGINT]):  # the terminal sends it to the ranks as well
                ranks.append(
                    subprocess.Popen([sys.executable, "-P", *command], env=own, stdout=output, stderr=output)
                )
        status = _wait(ranks, poll, kills)
        given_up = time.monotonic() + patience
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < given_up:
            time.sleep(POLL_S)
        return status
    finally:
        _stop(ranks)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun would set."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_PORT": port,
    }
    own = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    path = {"PYTHONPATH": package_path()}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {
        **os.environ,
        **own,
        **path,
        **threads,
        **marked(),
        **{name: str(number) for name, number in numbers.items()},
    }


def package_path() -> str:
    """Return a PYTHONPATH with which ranks import the same package as this process."""
    return os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))


def _wait(ranks: list[subprocess.Popen[bytes]], poll: Callable[[], object], kills: MemoryKills) -> int:
    """Wait until all ranks have ended or one has failed.

    Returns the status of the failed rank, 128 + the signal's number after a signal, or 0.
    """
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = [(rank, status) for rank, status in enumerate(statuses) if status]
        if failed:
            # a rank that was killed makes others fail
            rank, status = min(failed, key=lambda failure: failure[1] > 0)
            if status < 0:  # it could not print a message itself
                why = kills.explanation(ranks[rank].pid) if -status == signal.SIGKILL else ""
                print(f"rank {rank} {ended(status)}{why and f': {why}'}", file=sys.stderr, flush=True)
            return shell_status(status)
        if None not in statuses:
            return 0
        poll()
        time.sleep(POLL_S)


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
