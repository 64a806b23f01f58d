"""Measure this machine: `megalite benchmark …` in a checkout, where benchmarks/ holds what is measured; see `--help` there."""

from __future__ import annotations

import sys
from pathlib import Path

import megalite
from megalite.config.load import exit_with

CHECKOUT = Path(megalite.__file__).resolve().parents[1]


def main() -> None:
    """Run benchmarks/command.py of the checkout that this package is in."""
    if not (CHECKOUT / "benchmarks" / "command.py").is_file():
        exit_with("megalite benchmark: the benchmarks are not part of the installed package. Run it in a checkout of the source.")
    sys.path.insert(0, str(CHECKOUT))
    from benchmarks.command import main as measure

    measure()
