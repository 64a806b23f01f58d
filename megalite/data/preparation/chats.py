"""Encoding of chat data: one document with a loss mask per conversation."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.chat.records import BadRecord, Conversation, PromptCompletion, RecordReader
from megalite.data.chat.template import ChatTemplate, LossOn
from megalite.data.indexed import DataError
from megalite.data.preparation.encoded import Encoded, token_dtype
from megalite.data.preparation.tasks import BadRecords, Task, records
from megalite.data.tokenizer.tokenizers import Tokenizer


@dataclass(frozen=True)
class Chats:
    """Encodes conversations as documents.

    Attributes:
        template: Jinja source to use instead of the tokenizer's own
            (`megalite.data.chat.template.ChatTemplate`).
        loss_on: the tokens whose loss is counted.
        require_end: reject a conversation with a turn that is trained on and does not end with a token.
        max_length: maximum number of tokens of a conversation, or None. Longer ones are dropped or, with
            `truncate`, cut.
        reader: reader of the records.
        skip_bad: maximum number of bad records to skip in the whole input.
    """

    template: str | None = None
    loss_on: LossOn = "assistant"
    max_length: int | None = None
    truncate: bool = False
    reader: RecordReader = RecordReader()
    skip_bad: int = 0
    require_end: bool = True

    def encode(self, task: Task, tokenizer: Tokenizer) -> Encoded:
        """Encode a task.

        Raises DataError naming file, line and reason for the first record that is no conversation or that the
        template cannot render, if none may be skipped.
        """
        template = ChatTemplate(tokenizer, self.template, require_end=self.require_end)
        tokens, weights, sizes = array("i"), array("f"), array("i")
        bad, done = BadRecords(self.skip_bad > 0), Encoded(input_bytes=task.size)
        for record, where, replaced in records(task, bad):
            try:
                conversation = self.reader.read(record, where)
                ids, counts = self._rendered(template, conversation, where)
            except BadRecord as error:
                bad.add(error)
                continue
            long = self.max_length is not None and len(ids) > self.max_length
            if long:
                done.add_too_long(len(ids))
            if long and not self.truncate:
                continue
            ids, counts = ids[: self.max_length], counts[: self.max_length]
            if not any(counts[1:]):  # nothing predicts the first token
                done.without_loss += 1
                continue
            done.replaced += replaced
            done.forms.add(conversation.form)
            tokens.extend(ids)
            weights.extend(counts)
            sizes.append(len(ids))
        done.tokens = np.frombuffer(tokens, "i4").astype(token_dtype(tokenizer.vocab_size))
        done.sizes, done.mask = np.frombuffer(sizes, "i4"), _mask(np.frombuffer(weights, "f4"))
        done.bad, done.bad_first = bad.count, bad.first
        return done

    def check(self, record: Any, where: object) -> None:
        """Raise BadRecord if a record is no conversation."""
        self.reader.read(record, where)

    def _rendered(
        self, template: ChatTemplate, conversation: Conversation | PromptCompletion, where: object
    ) -> tuple[list[int], list[float]]:
        try:
            if isinstance(conversation, PromptCompletion):
                return template.pair(conversation.prompt, conversation.completion, loss_on=self.loss_on)
            prompt = range(0 if self.loss_on == "all" else conversation.prompt)
            weights = {**conversation.weights, **dict.fromkeys(prompt, 0)}
            return template.render(
                conversation.messages, tools=conversation.tools, loss_on=self.loss_on, weights=weights
            )
        except DataError as error:
            raise BadRecord(where, f": {error}") from None


def _mask(weights: NDArray[np.float32]) -> NDArray[np.uint8 | np.float32]:
    """Return the weights, as uint8 if all are 0 or 1."""
    return weights if ((weights != 0) & (weights != 1)).any() else weights.astype("u1")
