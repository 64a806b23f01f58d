"""Measure this machine: `megalite benchmark …` in a checkout, whose benchmarks/ has the measurements; see
`--help` there."""

from __future__ import annotations

from megalite.commands.parser import Parser


def main() -> None:
    """Run benchmarks/command.py of the checkout that contains this package."""
    Parser().enter_checkout()
    from benchmarks.command import main as measure

    measure()
