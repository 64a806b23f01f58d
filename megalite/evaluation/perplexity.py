"""Perplexity of texts under sliding windows: every token is predicted once, most of them with a long context.

A text of n tokens t(1) … t(n) follows a token t(0) that begins a document. With windows of N tokens and a
stride of S, the first window predicts t(1) … t(N). Each further window predicts the next S tokens (the last
one the rest) and has as inputs the N tokens before its last target, so each token except the first N is
predicted from N − S + 1 to N tokens. Then

    loss = − Σ ln p(t(i) | its context) / n        perplexity = exp(loss)
    bits per byte = loss · n / (ln 2 · bytes of the text in UTF-8)

The windows are those of transformers' guide on perplexity
(https://huggingface.co/docs/transformers/perplexity), and, for S = N, those of lm-evaluation-harness. A
smaller stride costs N / S times the time of S = N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.config.errors import ConfigError
from megalite.evaluation.scoring import Progress, ScoredTokens, score
from megalite.generation.language_model import LanguageModel

HIGHEST = 700.0  # loss per token; the perplexity of a higher one overflows a float


@dataclass(frozen=True)
class Text:
    """The result for one or more texts.

    The number of tokens and bytes, and the negative log-probability of all tokens.
    """

    name: str
    tokens: int
    bytes: int
    nats: float

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.name,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": self.loss,
            "perplexity": math.exp(self.loss),
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
        }


def together(texts: Sequence[Text]) -> Text:
    """Combine the results of several texts that were predicted independently."""
    return Text(
        "total", *(sum(getattr(text, name) for text in texts) for name in ("tokens", "bytes", "nats"))
    )


def windows(tokens: Sequence[int], length: int, stride: int) -> Iterator[ScoredTokens]:
    """Split a text into rows of at most `length` inputs that score every token except the first once."""
    done, last = 0, len(tokens) - 1
    while done < last:
        stop = min(done + (stride if done else length), last)
        yield ScoredTokens(tokens[max(0, stop - length) : stop + 1], stop - done)
        done = stop


def measure(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    name: str,
    size: int,
    length: int,
    stride: int,
    batch_size: int,
    progress: Progress | None = None,
) -> Text:
    """Compute the perplexity of a text.

    Args:
        tokens: the token that begins a document, then the text.
        size: bytes of the text.

    Raises:
        ConfigError: the loss is not finite or too large.
    """
    rows = list(windows(tokens, length, stride))
    nats = -math.fsum(scored.log_probability for scored in score(model, rows, batch_size, progress))
    if not nats < HIGHEST * (len(tokens) - 1):
        raise ConfigError(f"{name}: cannot compute the perplexity, the loss is {nats:g}.")
    return Text(name, len(tokens) - 1, size, nats)
