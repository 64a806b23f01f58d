"""Measure this machine: `megalite benchmark …` in a checkout, whose benchmarks/ has the measurements; see `--help` there."""

from __future__ import annotations

import signal
import sys

from megalite.commands.parser import Parser


def main() -> None:
    """Run benchmarks/command.py of the checkout that contains this package."""
    Parser().enter_checkout()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the measured processes end with this one
    from benchmarks.command import main as measure

    measure()
