"""How the next token is drawn: temperature, top-k, top-p, and one keyed number for each draw.

A draw depends on the logits and on (seed, row, position) alone: not on who makes it, nor on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite import rng

KEYS = 2**63  # rng.key is below


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among this many most likely tokens; 0 draws among all.
        top_p: draw among the fewest most likely of those that have at least this probability together (Holtzman et al. 2020); 1: all.
        seed: of the draws.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


def uniform(seed: int, row: int, position: int) -> float:
    """The number in [0, 1) that decides which token stands at a position of a row."""
    return rng.key(seed, "draw", row, position) / KEYS


def draw(logits: Tensor, sampling: Sampling, numbers: Sequence[float]) -> Tensor:
    """One token for each row of logits [rows, vocabulary]: [rows] int64. `numbers`: a uniform one for each row."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    count = logits.shape[-1]
    values, indices = logits.double().topk(min(sampling.top_k or count, count))  # descending
    scores = (values - values[:, :1]) / sampling.temperature  # the largest is 0, which no tiny temperature overflows
    probabilities = torch.softmax(scores, -1)
    before = probabilities.cumsum(-1) - probabilities
    cumulative = probabilities.masked_fill(before >= sampling.top_p, 0).cumsum(-1)
    wanted = torch.tensor(numbers, dtype=torch.float64, device=logits.device).unsqueeze(1) * cumulative[:, -1:]
    place = (cumulative <= wanted).sum(-1, keepdim=True)  # the first that goes beyond: never one without probability
    return indices.gather(1, place.clamp_max_(indices.shape[1] - 1)).squeeze(1)
