"""SIGINT, SIGTERM and SIGHUP from the first line of a command to its last. No signal makes a process print a
traceback.

    train, before its first step    the process ends at once with one line: `ending`
    train, from then on             the run saves and ends: `megalite.training.signals`
    other commands                  KeyboardInterrupt in the main thread, so that `finally` removes what is
    half-written: `raising`
    ranks of other commands         end at once and silently; the command that started them decides: `ending`

After a first signal a second one always ends the process at once. A signal handler of Python runs only
between two instructions of the main thread, which may be inside a collective or a save; so a thread learns of
every signal, too, and can end the process meanwhile.
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

from megalite.system.processes import launched

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STACK = 1 << 19  # bytes
SAME_PRESS_S = 1.0
"""Under a launcher, repeats within this time of the first signal are the same Ctrl-C: from the terminal, and
forwarded by the launcher."""
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it

Handler = Callable[[int, FrameType | None], None]


class Interrupt(KeyboardInterrupt):
    """A signal asks the command to end."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Listener:
    """Calls `react` with the number of each signal, on a thread. Created and closed by the main thread;
    `close` restores what was before.

    Args:
        react: must be brief; the next signal waits for it.
        signals: SIGHUP is left alone if it is ignored, as under nohup.
        handler: called by the main thread, when it can.
    """

    def __init__(
        self,
        react: Callable[[int], None],
        signals: Sequence[int] = SIGNALS,
        handler: Handler = lambda number, frame: None,
    ):
        self._react = react
        self._heard = [
            each
            for each in signals
            if not (each == signal.SIGHUP and signal.getsignal(each) is signal.SIG_IGN)
        ]
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        before = stack_size(STACK)  # not the usual 8 MB, which counts where a process may not allocate more
        Thread(target=self._run, name="megalite-signals", daemon=True).start()
        stack_size(before)
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {each: signal.signal(each, handler) for each in self._heard}

    def close(self) -> None:
        """Restore the handlers that were there before, and end the thread."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._fd_before, warn_on_full_buffer=False)
        os.close(self._write)

    def _run(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number in self._heard:
                    self._react(number)
        os.close(self._read)


def _forget_parent() -> None:
    """After a fork, the child's signals must not be told to its parent's thread."""
    with suppress(ValueError):  # forked by another thread than the main one, which has no descriptor
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_parent)


def end(line: str, status: int) -> NoReturn:
    """End the process at once, from any thread. Only local rank 0 writes the line."""
    if line and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        with suppress(OSError):
            os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{line}\n".encode())
    os._exit(status)


def status_of(number: int) -> int:
    """The exit status of a command that a signal has ended, as a shell shows it."""
    return 128 + number


def line_of(number: int) -> str:
    """What a command says that a signal has ended."""
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


class Second:
    """Tells whether a signal is a second one, after which the process ends at once."""

    def __init__(self) -> None:
        self.first: float | None = None  # when the first one arrived

    def __call__(self) -> bool:
        """Whether the signal that has just arrived is a second one."""
        now = monotonic()
        if self.first is None:
            self.first = now
            return False
        return not launched() or now - self.first > SAME_PRESS_S


def ending(
    what: str = "",
    status: Callable[[int], int] = status_of,
    *,
    signals: Sequence[int] = SIGNALS,
    quiet: bool = False,
    before: Callable[[int], object] | None = None,
) -> Listener:
    """From now on a signal ends the process at once, with one line.

    Args:
        what: the end of the line.
        status: the exit status for a signal's number.
        quiet: without the line.
        before: called first with the number; a second Ctrl-C does not wait for it.
    """
    second = Second()

    def finish(number: int) -> None:
        if before is not None:
            with suppress(Exception):  # a full disk must not keep the process from ending
                before(number)
        end("" if quiet else line_of(number) + what, status(number))

    def react(number: int) -> None:
        if second.first is None:
            Thread(target=finish, args=(number,), daemon=True).start()
        if second() and number == signal.SIGINT:
            end("" if quiet else line_of(number), status(number))

    return Listener(react, signals)


def training_signals() -> list[int]:
    """What ends a training process before and after its steps. The SLURM script starts it with SIGUSR1
    ignored until it can save."""
    return [*SIGNALS, *([] if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN else [signal.SIGUSR1])]


@contextmanager
def raising() -> Iterator[list[int]]:
    """The first signal raises Interrupt in the main thread, the second one ends the process at once. Yields
    those that have arrived."""
    second = Second()
    arrived: list[int] = []

    def react(number: int) -> None:
        if second():
            end(line_of(number), status_of(number))

    def handle(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if len(arrived) == 1:
            raise Interrupt(number)

    listener = Listener(react, handler=handle)
    try:
        yield arrived
    finally:
        listener.close()


def unblock() -> None:
    """Let the signals through that the launcher has blocked (`processes.blocked`) while this process could
    not handle them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
