"""What a check found, and a time limit for checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Thread
from typing import Literal

Verdict = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        verdict: `bad` if training cannot work with it; `note` if it may be slow, or if something optional is
            missing.
        advice: what to do; empty if it is good.
    """

    name: str
    value: str
    verdict: Verdict = "good"
    advice: str = ""


Check = Callable[[], Iterable[Finding]]


def bounded(name: str, check: Check, seconds: float) -> list[Finding]:
    """Return the findings of a check, or one that reports that it failed or timed out."""
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.extend(check())
        except Exception as error:  # a check must not prevent the others
            findings.append(Finding(name, "check failed", "note", f"{type(error).__name__}: {error}"))

    running = Thread(target=run, daemon=True)
    running.start()
    running.join(seconds)
    if running.is_alive():
        return [
            *findings,
            Finding(
                name,
                f"no answer in {seconds:g} s",
                "bad",
                "The check hangs. Check the network, the name service and the disk.",
            ),
        ]
    return findings
