"""Splitting of long texts into pieces that are tokenized in parallel with the same result.

A text is cut after the first line end of each range where encoding both sides apart gives the tokens of
encoding them together, tried on WINDOW bytes on either side. Each task finds the cuts around its range by
itself, so that they depend on the text and the tokenizer alone. A tokenizer may add something to the
beginning of a text, as sentencepiece adds a space: a piece is encoded with the line end before it, whose
tokens are then removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from megalite.data.preparation.tasks import ByteRange
from megalite.data.tokenizer.tokenizers import Tokenizer

WINDOW = 1024  # bytes
CANDIDATES = 32  # line ends that are tried in a range; a range without a cut is joined to the one before it


def read_piece(span: ByteRange, tokenizer: Tokenizer) -> tuple[bytes, bool]:
    """Return the bytes between the cuts around a range, and whether they reach the end of the file.

    They are empty if no piece begins in the range.
    """
    with span.path.open("rb") as file:
        size = file.seek(0, 2)
        start: int | None = 0 if span.start == 0 else _cut(file, span.start, span.stop, tokenizer)
        if start is None:
            return b"", False
        step, at, stop = span.stop - span.start, span.stop, size
        while at < size:
            if (cut := _cut(file, at, min(at + step, size), tokenizer)) is not None:
                stop = cut
                break
            at += step
        file.seek(start)
        return file.read(stop - start), stop == size


def _cut(file: BinaryIO, start: int, stop: int, tokenizer: Tokenizer) -> int | None:
    """Return the first position in [start, stop) where the text can be cut, or None.

    Only the CANDIDATES first line ends are tried.
    """
    file.seek(start)
    content = file.read(min(stop - start, CANDIDATES * WINDOW))
    at = -1
    for _ in range(CANDIDATES):
        at = content.find(b"\n", at + 1)
        if at < 0 or start + at + 1 >= stop:
            return None
        file.seek(max(0, start + at + 1 - WINDOW))
        before = file.read(min(WINDOW, start + at + 1)).decode(errors="replace")
        after = file.read(WINDOW).decode(errors="replace")
        rest = continued(after, tokenizer)
        if rest is not None and [*tokenizer.encode(before), *rest] == tokenizer.encode(before + after):
            return start + at + 1
    return None


def continued(text: str, tokenizer: Tokenizer) -> Sequence[int] | None:
    """Tokenize a text that follows a line end, or return None if the line end is part of a token."""
    line_end = tokenizer.encode("\n")
    tokens = tokenizer.encode("\n" + text)
    return tokens[len(line_end) :] if tokens[: len(line_end)] == line_end else None
