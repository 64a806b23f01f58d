"""Measure this machine: `megalite benchmark …` in a checkout, where benchmarks/ holds what is measured; see `--help` there."""

from __future__ import annotations

from megalite.commands.parser import Parser


def main() -> None:
    """Run benchmarks/command.py of the checkout that this package is in."""
    Parser().enter_checkout()
    from benchmarks.command import main as measure

    measure()
