"""Token files of preferences: random pairs of completions of one prompt, and completions with a label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalite.data.indexed import CHOSEN, REJECTED
from megalite.data.preparation.writer import IndexedWriter

VOCAB, EOS = 61, 0


def write_preferences(prefix: Path, lengths: Sequence[tuple[int, int, int]], seed: int = 0) -> str:
    """Write pairs of (tokens of the prompt, of the chosen completion, of the rejected one); returns PREFIX.

    Completions end with EOS. The last token of the vocabulary does not occur.
    """
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, VOCAB, masked=True) as writer:
        for prompt, *completions in lengths:
            start = random.integers(1, VOCAB - 1, prompt)
            for kind, length in zip((CHOSEN, REJECTED), completions, strict=True):
                tokens = np.concatenate([start, random.integers(1, VOCAB - 1, length - 1), [EOS]])
                writer.add(tokens, [len(tokens)], np.repeat([0, kind], [prompt, length]).astype(np.uint8))
        writer.finish({"vocab_size": VOCAB, "eos": EOS, "chat": {}, "preference": "pairs"})
    return str(prefix)


def write_labelled(prefix: Path, lengths: Sequence[tuple[int, int]], labels: Sequence[bool], seed: int = 0) -> str:
    """Write completions of (tokens of the prompt, of the completion) that are good or bad; returns PREFIX."""
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, VOCAB, masked=True) as writer:
        for (prompt, completion), good in zip(lengths, labels, strict=True):
            tokens = np.concatenate([random.integers(1, VOCAB - 1, prompt + completion - 1), [EOS]])
            kinds = np.repeat([0, CHOSEN if good else REJECTED], [prompt, completion]).astype(np.uint8)
            writer.add(tokens, [len(tokens)], kinds)
        writer.finish({"vocab_size": VOCAB, "eos": EOS, "chat": {}, "preference": "labelled"})
    return str(prefix)
