"""Handling of SIGINT, SIGTERM and SIGHUP in every command, from its first line to its last.

    train, before its first step    the process ends at once with one line: `end_training_on_signal`
    train, from then on             the run saves and ends: `training.stop_requests`
    other commands                  `raise_on_signal` raises KeyboardInterrupt in the main thread, so that
                                    `finally` removes partial files
    ranks of other commands         end at once without a line; the command that started them reports it

No signal prints a traceback, and a second one ends the process at once. A signal handler of Python runs only
between two instructions of the main thread, which may be inside a collective or a save. A thread is therefore
notified of every signal as well, and can end the process meanwhile.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread, stack_size
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from megalite.launch.exit_status import signal_status, training_status
from megalite.system.processes import launched

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESIZE_SIGNAL = signal.SIGUSR2
"""A launcher sends it to the ranks of a run that is to continue on another number of ranks."""
STACK = 1 << 19  # bytes
SAME_PRESS_S = 1.0
"""Under a launcher, repeats within this time of the first signal are the same Ctrl-C: from the terminal, and
forwarded by the launcher."""
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it

Handler = Callable[[int, FrameType | None], None]


class Interrupt(KeyboardInterrupt):
    """A signal that interrupted a command."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class SignalListener:
    """Calls a function with the number of each signal, on a thread. The main thread creates and closes it.

    Args:
        react: the function; must be brief, since the next signal waits for it.
        signals: SIGHUP is left alone if it is ignored, as under nohup.
        handler: the signal handler, which the main thread calls between two instructions.
    """

    def __init__(
        self,
        react: Callable[[int], None],
        signals: Sequence[int] = SIGNALS,
        handler: Handler = lambda number, frame: None,
    ):
        self._react = react
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = [number for number in signals if not (ignored and number == signal.SIGHUP)]
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = stack_size(STACK)  # not the usual 8 MB, which counts where a process may not allocate more
        Thread(target=self._run, name="megalite-signals", daemon=True).start()
        stack_size(before)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handlers_before: dict[int, Any] = {
            number: signal.signal(number, handler) for number in self._signals
        }

    def close(self) -> None:
        """Restore the previous handlers and stop the thread."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before, warn_on_full_buffer=False)
        os.close(self._write)

    def _run(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number in self._signals:
                    self._react(number)
        os.close(self._read)


def _forget_parent() -> None:
    """After a fork: the child's signals must not be written to the pipe of its parent's thread."""
    with suppress(ValueError):  # forked by another thread than the main one, which has no descriptor
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_parent)


def end_at_once(line: str, status: int) -> NoReturn:
    """End the process at once, from any thread. Only local rank 0 writes the line."""
    if line and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with suppress(OSError):
            os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{line}\n".encode())
    os._exit(status)


def signal_message(number: int) -> str:
    """Return the message of a command that was stopped by a signal."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


class RepeatedSignal:
    """A detector of a second signal, which ends the process at once."""

    def __init__(self) -> None:
        self.first: float | None = None  # when the first one arrived

    def arrived(self) -> bool:
        """Record a signal and return whether it is the second one."""
        now = monotonic()
        if self.first is None:
            self.first = now
            return False
        return not launched() or now - self.first > SAME_PRESS_S


def end_on_signal(
    where: str = "",
    status: Callable[[int], int] = signal_status,
    *,
    signals: Sequence[int] = SIGNALS,
    quiet: bool = False,
    before: Callable[[int], object] | None = None,
) -> SignalListener:
    """End the process at once, with one line, on every later signal.

    Args:
        where: the end of the line.
        status: returns the exit status for a signal's number.
        quiet: write no line.
        before: called first, with the signal's number; a second Ctrl-C does not wait for it.
    """
    repeated = RepeatedSignal()

    def finish(number: int) -> None:
        if before is not None:
            with suppress(Exception):  # a full disk must not keep the process from ending
                before(number)
        end_at_once("" if quiet else signal_message(number) + where, status(number))

    def react(number: int) -> None:
        if repeated.first is None:
            Thread(target=finish, args=(number,), daemon=True).start()
        if repeated.arrived() and number == signal.SIGINT:
            end_at_once("" if quiet else signal_message(number), status(number))

    return SignalListener(react, signals)


def end_training_on_signal(where: str, before: Callable[[int], object] | None = None) -> SignalListener:
    """Like `end_on_signal`, for a training process before and after its steps, which SIGUSR1 ends as well.

    A script may start it with SIGUSR1 ignored until it can save.
    """
    ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signals = (*SIGNALS, RESIZE_SIGNAL) if ignored else (*SIGNALS, RESIZE_SIGNAL, signal.SIGUSR1)
    return end_on_signal(where, training_status, signals=signals, before=before)


@contextmanager
def raise_on_signal() -> Iterator[list[int]]:
    """Raise Interrupt in the main thread on the first signal, and end the process on the second.

    Yields the list of signals that have arrived.
    """
    repeated = RepeatedSignal()
    arrived: list[int] = []

    def react(number: int) -> None:
        if repeated.arrived():
            end_at_once(signal_message(number), signal_status(number))

    def handle(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if len(arrived) == 1:
            raise Interrupt(number)

    listener = SignalListener(react, handler=handle)
    try:
        yield arrived
    finally:
        listener.close()


def unblock() -> None:
    """Unblock the signals that the launcher has blocked (`processes.blocked`)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, RESIZE_SIGNAL))
