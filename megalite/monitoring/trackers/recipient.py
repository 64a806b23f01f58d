"""Delivery of metrics to a tracker in a thread of its own, so that its errors and delays reach no step.

Measurements wait in a queue of bounded length. If the tracker fails, it is opened again later and gets those
that wait; if it hangs, the thread waits and the run goes on. What it did not store is counted and reported at
the end. metrics.jsonl has every line in any case.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic

from megalite.monitoring.trackers.client import Client, Measurement
from megalite.system.messages import counted, say

RETRY_S, LONGEST_RETRY_S = 60.0, 900.0
"""From a failure until the next attempt, doubled by each further one, since an attempt may take as long."""
MOST_WAITING = 10_000  # lines; about 20 MB
BATCH = 100  # lines that a client gets at once
HANGS_S = 60.0
"""A call that takes longer is reported."""
LONGEST_REASON = 160  # characters
CLOSE_S = 30.0
"""What the end of a run waits for a tracker."""


class Recipient:
    """Recipient that passes metrics to a client.

    Args:
        name: name in messages.
        open_client: opens the client to continue after a step.
        rewinds: whether a client can be opened again at an earlier step.
    """

    def __init__(self, name: str, open_client: Callable[[int], Client], step: int, rewinds: bool = True):
        self._name, self._open, self._rewinds = name, open_client, rewinds
        self._client: Client | None = None
        self._step = step  # the next client continues after it
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Measurement | int] = deque()  # an int: continue after this step
        self._sending: list[Measurement] = []
        self._closing = self._gave_up = self._failed_run = False
        self._retry_at, self._pause = 0.0, RETRY_S
        self._failing = False  # since the last measurements that were stored
        self._total = self._lost = 0
        self._reason = "it is too slow"
        self._said: set[str] = set()
        self._call_since: float | None = None
        self._thread = threading.Thread(target=self._deliver, name=f"megalite {name}", daemon=True)
        self._thread.start()

    def rewind(self, step: int) -> None:
        """Continue after an earlier step, if the client supports it."""
        if self._rewinds:
            self._put(step)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Take the numbers of a line. Returns at once."""
        self._total += 1
        self._put(Measurement(step, scalars, time.time()))
        since = self._call_since
        if since is not None and monotonic() - since > HANGS_S:
            self._say_once(
                f"has not answered for {HANGS_S:.0f} s. Training continues; up to {MOST_WAITING:,} lines "
                "wait for it"
            )

    def close(self, failed: bool = False) -> None:
        """Deliver what waits, for at most CLOSE_S seconds, and say what could not be stored.

        Args:
            failed: whether the run ends by an error.
        """
        with self._changed:
            self._closing, self._failed_run = True, failed
            self._changed.notify()
        self._thread.join(CLOSE_S)
        with self._changed:
            left = [*self._sending, *self._waiting]
            lost = self._lost + sum(isinstance(each, Measurement) for each in left)
        hangs = self._thread.is_alive()
        if lost:
            reason = f"it did not answer within {CLOSE_S:.0f} s" if hangs else self._reason
            say(
                f"{self._name} lacks {lost:,} of the {counted(self._total, 'line')} of this start: {reason}. "
                "metrics.jsonl has them all"
            )
        elif hangs:
            say(f"{self._name} has not ended the run within {CLOSE_S:.0f} s")

    def _put(self, item: Measurement | int) -> None:
        with self._changed:
            self._waiting.append(item)
            self._bound()
            self._changed.notify()

    def _bound(self) -> None:
        """Drop the oldest lines of a queue that is too long."""
        while len(self._waiting) > MOST_WAITING:
            if isinstance(self._waiting.popleft(), Measurement):
                self._lost += 1

    def _deliver(self) -> None:
        self._attempt(self._reopen)  # before the first line: what is wrong is said at the start of a run
        while self._await():
            self._attempt(self._send)
        if (client := self._client) is not None:
            self._attempt(lambda: client.close(self._failed_run))

    def _await(self) -> bool:
        """Wait until there is something to send. Return False at the end."""
        with self._changed:
            while True:
                if self._closing and (self._gave_up or not self._waiting):
                    return False
                pause = 0.0 if self._closing else self._retry_at - monotonic()
                if self._waiting and pause <= 0:
                    return True
                self._changed.wait(pause if self._waiting else None)

    def _send(self) -> None:
        with self._changed:
            if isinstance(first := self._waiting[0], int):
                self._waiting.popleft()
                self._step = first
            elif self._client is None:
                self._step = first.step - 1
        if isinstance(first, int):
            client, self._client = self._client, None
            if client is not None:
                client.close(False)
            return
        if self._client is None:
            self._reopen()
        with self._changed:
            # after a failure one line alone: if it fails in a client that could be opened, it is the reason
            for _ in range(1 if self._failing else BATCH):
                if self._waiting and isinstance(line := self._waiting[0], Measurement):
                    self._sending.append(line)
                    self._waiting.popleft()
        assert self._client is not None
        self._client.log(self._sending)
        with self._changed:
            self._sending = []
            self._failing, self._pause = False, RETRY_S

    def _reopen(self) -> None:
        self._client = self._open(self._step)

    def _attempt(self, action: Callable[[], None]) -> None:
        self._call_since = monotonic()
        try:
            action()
        # errors of another library must not end a run, of any type: some exit
        except (Exception, SystemExit) as error:
            self._failed(brief(str(error)) or type(error).__name__)
        finally:
            self._call_since = None

    def _failed(self, reason: str) -> None:
        with self._changed:
            if self._failing and self._sending:
                self._lost += len(self._sending)
            else:
                self._waiting.extendleft(reversed(self._sending))
                self._bound()
            self._sending, self._client, self._failing = [], None, True
            self._gave_up = self._closing
            pause, self._pause = self._pause, min(2 * self._pause, LONGEST_RETRY_S)
            self._retry_at = monotonic() + pause
        self._reason = reason
        self._say_once(
            f"failed: {reason}",
            "" if self._closing else f". Training continues; the next attempt is in {pause:.0f} s",
        )

    def _say_once(self, what: str, then: str = "") -> None:
        """Say the first failure, and the first call that takes long."""
        kind = what.split()[0]
        if kind not in self._said:
            self._said.add(kind)
            say(f"{self._name} {what}{then}")


def brief(text: str) -> str:
    """Return the first line of an error, both its ends if it is long: libraries wrap their reasons."""
    line = text.strip().split("\n")[0].rstrip(".")
    return (
        line
        if len(line) <= LONGEST_REASON
        else f"{line[: LONGEST_REASON // 2]} … {line[-LONGEST_REASON // 2 :]}"
    )
