"""A process that a launcher has started ends with it: nothing holds memory, a GPU or a port once the launcher
is killed.

A launcher is torchrun, or a process of ours that starts others. Ours passes itself on in the environment
variable MEGALITE_LAUNCHER; torchrun starts each worker in a session of its own, so it is the parent of the
session's leader. On Linux the kernel kills a process together with its parent (PR_SET_PDEATHSIG), and a
thread watches every process up to the launcher, which may be behind a wrapper (`torchrun … bash run.sh`).
Elsewhere the thread sees that the parent has changed. A process without a launcher is not watched: after
`nohup … &` it may outlive its shell.

The kernel acts when the *thread* that started a process ends, so launchers start processes from their main
thread.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import NoReturn

LAUNCHER = "MEGALITE_LAUNCHER"
"""Environment variable: the number of the launcher's process and, where /proc exists, when it started."""
ORPHANED = 1  # exit status
POLL_S = 1.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Process:
    """A process and its parent and start time, which are None if the system does not report them."""

    pid: int
    parent: int | None = None
    # ticks since the kernel's start: another process may get the same number later
    started: int | None = None


def look(pid: int) -> Process | None:
    """Return a process of this machine, or None if it has ended or is a zombie."""
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # after the name, which may contain anything
        return None if fields[0] in b"ZX" else Process(pid, int(fields[1]), int(fields[19]))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # it exists
        pass
    return Process(pid)


def marked() -> dict[str, str]:
    """Return the environment variable that makes a process end with this one."""
    own = look(os.getpid())
    return {LAUNCHER: f"{os.getpid()} {own.started if own and own.started is not None else ''}"}


def launched() -> bool:
    """Return whether a launcher has started this process."""
    return LAUNCHER in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def watch() -> None:
    """End this process as soon as its launcher ends, or now if it has ended already. Does nothing without a
    launcher.

    Called before anything that takes long: a launcher may be killed while its processes still import.
    """
    if launched():
        _die_with_parent()
        _follow(_from_environment())


def watch_parent() -> None:
    """Watch the parent of a `multiprocessing` process as `watch` does the launcher."""
    import multiprocessing

    parent = multiprocessing.parent_process()
    _die_with_parent()
    if parent is not None and parent.pid is not None:
        _follow(_up_to(parent.pid, None))


@contextmanager
def blocked(signals: Sequence[int]) -> Iterator[None]:
    """Context manager that starts processes with signals blocked.

    A child process has the signals blocked from its first instruction until it unblocks them. In this
    process, signals that end a command are handled at the end of the block, so that no process is left half
    started. Python runs handlers in the main thread, whichever thread receives the signal and even if the
    main thread has blocked it, so the handlers are replaced.
    """
    delayed: list[int] = []
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if current_thread() is main_thread() else ()
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {
        each: handler for each in heard if callable(handler := signal.getsignal(each))
    }
    for each in handlers:
        signal.signal(each, lambda number, frame: delayed.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in delayed:
            handlers[number](number, None)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent exits.

    The caller must then check whether the parent had already exited.
    """
    if sys.platform == "linux":
        import ctypes  # imported only under a launcher

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _follow(chain: list[Process] | None) -> None:
    """Watch the processes from the parent up to the launcher; None means that the launcher has exited."""
    if chain is None:
        _end()
    if chain:
        Thread(target=_poll, args=(chain,), name="megalite-launcher", daemon=True).start()


def _poll(chain: list[Process]) -> None:
    while os.getppid() == chain[0].pid and all(_is_still(each, each is chain[-1]) for each in chain):
        time.sleep(POLL_S)
    _end()


def _is_still(seen: Process, last: bool) -> bool:
    """Whether a process lives, and still has its parent. What started the launcher may end."""
    now = look(seen.pid)
    return now is not None and now.started == seen.started and (last or now.parent == seen.parent)


def _end() -> NoReturn:
    with suppress(OSError):  # the terminal may have gone with the launcher
        os.write(
            2,
            f"rank {os.environ.get('RANK', '?')}: the launcher has ended; exiting without saving\n".encode(),
        )
    os._exit(ORPHANED)


def _from_environment() -> list[Process] | None:
    """Return the processes from the parent up to the launcher, which is the last one.

    Returns None if the launcher has exited, and an empty list if it is unknown.
    """
    if LAUNCHER in os.environ:
        pid, _, started = os.environ[LAUNCHER].partition(" ")
        return _up_to(int(pid), int(started) if started else None)
    leader = os.getsid(0)
    if leader == os.getpid() or leader == 0:  # 0: in another namespace of process numbers
        chain = [seen] if (seen := look(os.getppid())) else None
    else:
        chain = _up_to(leader, None)
        above = chain[-1].parent if chain else None
        if chain is not None and above:
            chain = [*chain, seen] if (seen := look(above)) else None
    if chain and (chain[-1].pid == 1 or not _is_python(chain[-1].pid)):
        return chain if _store_answers() else None if _has_agent_store() else []
    return chain


def _up_to(launcher: int, started: int | None) -> list[Process] | None:
    """Return the ancestors of this process up to one of them; None if it is not an ancestor."""
    chain: list[Process] = []
    pid = os.getppid()
    while (seen := look(pid)) is not None:
        chain.append(seen)
        if pid == launcher:
            return chain if started is None or started == seen.started else None
        if seen.parent is None:  # without /proc: only the parent and the launcher are watched
            top = look(launcher)
            return [*chain, top] if top else None
        pid = seen.parent
    return None


def _is_python(pid: int) -> bool:
    """Whether a process can be torchrun. What inherits the processes of an ended launcher, such as systemd,
    is not Python."""
    with suppress(OSError):
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    return False


def _has_agent_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_answers(attempts: int = 3) -> bool:
    """Whether torchrun's store, which exists before its workers, still does: its port refuses connections
    once torchrun has ended."""
    import socket

    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    for _ in range(attempts if _has_agent_store() else 0):
        try:
            socket.create_connection(address, timeout=5).close()
            return True
        except ConnectionRefusedError:
            time.sleep(0.3)
        except OSError:  # a network that is slow, or a name that is not known yet, proves nothing
            return True
    return False
