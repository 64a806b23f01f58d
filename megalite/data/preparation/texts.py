"""Encoding of texts as documents that end in EOS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.indexed import DataError
from megalite.data.preparation.contents import without_mark
from megalite.data.preparation.cuts import continued, read_piece
from megalite.data.preparation.encoded import Encoded, token_dtype
from megalite.data.preparation.tasks import BadRecords, ByteRange, Task, decoded, documents, text_of
from megalite.data.tokenizer.tokenizers import Tokenizer


@dataclass(frozen=True)
class Texts:
    """Encodes texts as documents that end in EOS.

    Attributes:
        text_key: the key of a record's text.
        skip_bad: maximum number of bad records of the whole input, which are skipped.
    """

    text_key: str = "text"
    skip_bad: int = 0

    def encode(self, task: Task, tokenizer: Tokenizer) -> Encoded:
        """Encode a task. Raises DataError for the first bad record if none may be skipped."""
        bad = BadRecords(self.skip_bad > 0)
        done = Encoded(input_bytes=task.size)
        if task.piece is not None:
            self._encode_piece(task.piece, tokenizer, done)
        else:
            texts = []
            for text, invalid in documents(task, self.text_key, bad):
                done.replaced += invalid
                texts.append(text)
            done.empty = texts.count("")
            _put(done, tokenizer.encode_batch([text for text in texts if text]), tokenizer, end=True)
        done.bad, done.bad_first = bad.count, bad.first
        return done

    def check(self, record: Any, where: object) -> None:
        """Raise BadRecord if a record has no text."""
        text_of(record, where, self.text_key)

    def _encode_piece(self, span: ByteRange, tokenizer: Tokenizer, done: Encoded) -> None:
        try:
            raw, last = read_piece(span, tokenizer)
        except OSError as error:  # a part of a document
            raise DataError(f"Failed to read --input {span.path}: {error.strerror}.") from None
        if raw:
            text, invalid = decoded(without_mark(raw) if span.start == 0 else raw)
            done.replaced, done.continues = int(invalid), span.start > 0
            ids = tokenizer.encode(text) if span.start == 0 else continued(text, tokenizer)
            assert ids is not None, "the cut was tried with the beginning of this text"
            _put(done, [ids], tokenizer, end=last)


def _put(
    done: Encoded, batch: Sequence[Sequence[int] | NDArray[np.integer]], tokenizer: Tokenizer, end: bool
) -> None:
    """Append the tokens of documents, with EOS after those that end."""
    done.sizes = np.fromiter((len(ids) + end for ids in batch), np.int32, len(batch))
    done.tokens = np.full(int(done.sizes.sum()), tokenizer.eos, token_dtype(tokenizer.vocab_size))
    at = 0
    for ids, size in zip(batch, done.sizes.tolist(), strict=True):
        done.tokens[at : at + len(ids)] = ids
        at += size
