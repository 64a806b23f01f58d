"""Encoding of preference data: a chosen and a rejected document of each pair, or one labelled document."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from megalite.data.chat.preference_records import Kind, Preference, PreferenceReader
from megalite.data.chat.records import BadRecord
from megalite.data.chat.template import ChatTemplate
from megalite.data.indexed import CHOSEN, REJECTED, DataError
from megalite.data.preparation.encoded import Encoded, token_dtype
from megalite.data.preparation.first_records import first_records
from megalite.data.preparation.sources import InputSource
from megalite.data.preparation.tasks import BadRecords, Task, records
from megalite.data.tokenizer.tokenizers import Tokenizer

TooLong = Literal["drop", "truncate", "keep_end", "truncate_prompt"]
Document = tuple[list[int], int]
"""The tokens of a prompt with its completion, and the number of the prompt's tokens."""


@dataclass(frozen=True)
class PreferenceEncoder:
    """Encodes preferences as documents, each a prompt with a completion.

    Attributes:
        template: Jinja source to use instead of the tokenizer's own
            (`megalite.data.chat.template.ChatTemplate`).
        max_length: maximum number of tokens of a document, or None.
        too_long: what to do with a preference that has a longer document: drop it, or cut each document at
            its end (truncate), at its beginning (keep_end), or the prompt at its beginning, and only what
            then is still too long at its end (truncate_prompt).
        reader: reader of the records.
        skip_bad: maximum number of bad records to skip in the whole input.
    """

    template: str | None = None
    max_length: int | None = None
    too_long: TooLong = "drop"
    reader: PreferenceReader = PreferenceReader()
    skip_bad: int = 0

    @property
    def kind(self) -> Kind | None:
        return self.reader.kind

    def of_kind_in(self, sources: Sequence[InputSource]) -> PreferenceEncoder:
        """Return the encoder for the kind of the first record that is a preference, unless it is given."""
        if self.kind is not None:
            return self
        for record, where in first_records(sources):
            try:
                kind = self.reader.read(record, where).kind
            except BadRecord:  # counted when it is encoded
                continue
            return replace(self, reader=replace(self.reader, kind=kind))
        return replace(self, reader=replace(self.reader, kind="pairs"))

    def encode(self, task: Task, tokenizer: Tokenizer) -> Encoded:
        """Encode a task.

        Raises DataError naming file, line and reason for the first record that is no preference or cannot be
        encoded, if none may be skipped.
        """
        template = ChatTemplate(tokenizer, self.template)
        tokens, mask, sizes = array("i"), bytearray(), array("i")
        bad, done = BadRecords(self.skip_bad > 0), Encoded(input_bytes=task.size)
        for record, where, replaced in records(task, bad):
            try:
                preference = self.reader.read(record, where)
                documents = self._documents(template, preference, where)
                length = max(len(ids) for ids, _ in documents)
                long = self.max_length is not None and length > self.max_length
                if long:
                    done.add_too_long(length)
                if long and self.too_long == "drop":
                    continue
                documents = self._cut(documents, where)
            except BadRecord as error:
                bad.add(error)
                continue
            done.replaced += replaced
            done.forms.add(preference.form)
            done.equal += len(documents) == 2 and documents[0] == documents[1]
            for (ids, prompt), chosen in zip(documents, preference.labels, strict=True):
                tokens.extend(ids)
                mask.extend(bytes(prompt) + bytes([CHOSEN if chosen else REJECTED]) * (len(ids) - prompt))
                sizes.append(len(ids))
                done.chosen += chosen
                done.rejected += not chosen
        done.tokens = np.frombuffer(tokens, "i4").astype(token_dtype(tokenizer.vocab_size))
        done.sizes, done.mask = np.frombuffer(sizes, "i4"), np.frombuffer(mask, "u1")
        done.bad, done.bad_first = bad.count, bad.first
        return done

    def check(self, record: Any, where: object) -> None:
        """Raise BadRecord if a record is no preference."""
        self.reader.read(record, where)

    def _documents(self, template: ChatTemplate, preference: Preference, where: object) -> list[Document]:
        try:
            whole, prompt = template.with_completions(
                preference.prompt, preference.completions, tools=preference.tools
            )
        except DataError as error:
            raise BadRecord(where, f": {error}") from None
        if any(len(ids) <= max(prompt, 1) for ids in whole):  # nothing predicts the first token
            raise BadRecord(
                where,
                ": the template writes no token of a completion after the prompt.",
                "Remove the record, or use another --chat_template.",
            )
        return [(ids, prompt) for ids in whole]

    def _cut(self, documents: list[Document], where: object) -> list[Document]:
        """Return the documents with at most `max_length` tokens."""
        length = max(len(ids) for ids, _ in documents)
        if self.max_length is None or length <= self.max_length:
            return documents
        _, prompt = documents[0]
        if self.too_long == "keep_end":
            return [
                (ids[-self.max_length :], max(0, prompt - max(0, len(ids) - self.max_length)))
                for ids, _ in documents
            ]
        removed = 0
        if self.too_long == "truncate_prompt":
            removed = max(0, min(length - self.max_length, prompt - 1))  # the prompt keeps its last token
        elif prompt >= self.max_length:
            raise BadRecord(
                where,
                f": the prompt has {prompt} tokens, so --max_length {self.max_length} leaves no token of its "
                "completions.",
                "Raise --max_length, or pass --too_long truncate_prompt, keep_end or drop.",
            )
        return [(ids[removed:][: self.max_length], prompt - removed) for ids, _ in documents]
