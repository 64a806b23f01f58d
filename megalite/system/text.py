"""Tables and shortened lists as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Format rows as lines with columns separated by two spaces.

    The first `left` columns are aligned left, the others right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in cells
        ).rstrip()

    return [line(row) for row in rows]


def abbreviated(words: Sequence[object], most: int) -> str:
    """Return the first `most` words, separated by commas, and the number of the others."""
    shown = ", ".join(map(str, words[:most]))
    return f"{shown} and {len(words) - most} more" if len(words) > most else shown
