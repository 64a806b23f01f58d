"""Sampling of the next token: temperature, top-k, top-p, and one keyed random number per draw.

A draw depends only on the logits and on (seed, row, position), not on the rank that makes it or on the rest
of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.system import rng

KEYS = 2**63  # rng.key is below this


@dataclass(frozen=True)
class Sampling:
    """Sampling options for the next token.

    Attributes:
        temperature: divisor of the logits; 0: always the most likely token.
        top_k: draw among this many most likely tokens; 0: among all.
        top_p: of those, draw among the smallest set of most likely tokens with at least this total
            probability (Holtzman et al. 2020); 1: among all.
        seed: seed of the draws.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


def uniform(seed: int, row: int, position: int) -> float:
    """Return the random number in [0, 1) that selects the token at a position of a row."""
    return rng.key(seed, "draw", row, position) / KEYS


def draw(logits: Tensor, sampling: Sampling, numbers: Sequence[float]) -> Tensor:
    """Draw one token per row of logits [rows, vocabulary]: [rows] int64.

    Args:
        numbers: a uniform random number per row.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    count = logits.shape[-1]
    values, indices = logits.double().topk(min(sampling.top_k or count, count))  # descending
    # the largest is 0: no overflow at low temperatures
    scores = (values - values[:, :1]) / sampling.temperature
    probabilities = torch.softmax(scores, -1)
    before = probabilities.cumsum(-1) - probabilities
    cumulative = probabilities.masked_fill(before >= sampling.top_p, 0).cumsum(-1)
    wanted = (
        torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(1) * cumulative[:, -1:]
    )
    # the first that exceeds it: never a token of probability 0
    place = (cumulative <= wanted).sum(-1, keepdim=True)
    return indices.gather(1, place.clamp_max_(indices.shape[1] - 1)).squeeze(1)
