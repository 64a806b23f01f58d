"""A trial of an objective of the user on the scores of made-up sequences.

What is wrong with it is one message before any rank is started, and not a traceback of every rank.
"""

from __future__ import annotations

import inspect
import traceback
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.objectives.find import OBJECTIVES, objective_of
from megalite.objectives.objective import Objective, Scores

COMPLETIONS, REFERENCES = (-6.5, -4.0, -9.0, -7.25), (-6.0, -4.5, -8.0, -7.0)
PROMPTS, BASELINE = (-3.0, -3.0, -5.0, -5.0), 0.1


class Computed(NamedTuple):
    """What an objective computes: its terms, what they are divided by, and the scores' totals."""

    terms: list[Tensor]
    counts: list[Tensor]
    leaf: Tensor


def try_objective(config: Config) -> None:
    """Compute an objective of the user and its gradient on two pairs, or four labelled completions.

    Raises:
        ConfigError: it fails, is no sum over sequences, or has no gradient.
    """
    option = f"train.objective = {config.train.objective}"
    if config.train.objective in OBJECTIVES or (objective := objective_of(config)) is None:
        return
    name = type(objective).__name__
    try:
        one = _compute(objective)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    except Exception as error:
        if unmet := _unmet(objective):
            raise ConfigError(
                f"{option}: {name} reads scores that it does not ask for. Set {unmet} = True in {name}."
            ) from error
        raise ConfigError(f"{option}: {name} fails on made-up scores: {_told(error, objective)}.") from error
    _check_gradient(f"{option}: {name}", one)
    _check_sums(f"{option}: {name}", one, _compute(objective, copies=2))


def _compute(objective: Objective, copies: int = 1, given: tuple[str, ...] = ()) -> Computed:
    """Compute an objective.

    Args:
        copies: how often each sequence is in the batch.
        given: `needs_reference` and `needs_baseline`, whose scores are there although nobody asks for them.
    """

    def values(of: tuple[float, ...]) -> Tensor:
        return torch.tensor(of * copies, dtype=torch.float64)

    def wanted(need: str) -> bool:
        return getattr(objective, need) or need in given

    def scores(totals: Tensor) -> Scores:
        rewards = objective.reads == "rewards"
        prompt, completion = 0 * totals if rewards else totals
        return Scores(
            completion,
            prompt,
            completion_tokens=values((3.0, 2.0, 4.0, 4.0)),
            prompt_tokens=values((5.0, 5.0, 7.0, 7.0)),
            labels=torch.tensor([1, 0] * 2 * copies),
            reference=values(REFERENCES) if wanted("needs_reference") else None,
            baseline=values((BASELINE,))[0] if wanted("needs_baseline") else None,
            reward=totals[1] if rewards else None,
        )

    leaf = torch.stack([values(PROMPTS), values(COMPLETIONS)]).requires_grad_()
    terms = _numbers(objective, "terms", objective.terms(scores(leaf)))
    counts = _numbers(objective, "counts", objective.counts(scores(0 * leaf.detach())))
    measures = objective.measures(scores(leaf.detach()))
    for metric in objective.metrics:
        if metric not in measures:
            raise ConfigError(f"{type(objective).__name__}.measures does not return {metric}. Add it.")
        _numbers(objective, f"measures of {metric}", measures[metric])
    if len(terms) != len(counts):
        raise ConfigError(
            f"{type(objective).__name__} has {len(terms)} terms and {len(counts)} counts. Return one count "
            "for each term."
        )
    return Computed(terms, counts, leaf)


def _numbers(objective: Objective, method: str, returned: object) -> list[Tensor]:
    """Return what a method has returned. Raises ConfigError unless these are tensors of one number each."""
    if isinstance(returned, (list, tuple)) and all(
        isinstance(each, Tensor) and each.shape == () for each in returned
    ):
        return list(returned)
    raise ConfigError(
        f"{type(objective).__name__}.{method} must be sums over the sequences, a list of tensors of shape []."
    )


def _unmet(objective: Objective) -> str:
    """Return what an objective that fails should ask for, or an empty string if that does not help."""
    for given in (("needs_reference",), ("needs_baseline",), ("needs_reference", "needs_baseline")):
        needed = [need for need in given if not getattr(objective, need)]
        try:
            if needed:
                _compute(objective, given=given)
                return " = True and ".join(needed)
        except Exception:  # it fails for another reason
            continue
    return ""


def _check_gradient(which: str, computed: Computed) -> None:
    """Raise ConfigError if a loss does not depend on the scores of the model."""
    loss = torch.stack(computed.terms).sum()
    if not loss.requires_grad or torch.autograd.grad(loss, computed.leaf, allow_unused=True)[0] is None:
        raise ConfigError(
            f"{which} has no gradient: its loss does not depend on the scores, or is detached from them. "
            "Leave out detach(), item() and no_grad()."
        )


def _check_sums(which: str, one: Computed, two: Computed) -> None:
    """Raise ConfigError if a term is a mean, which does not change if each sequence is there twice."""
    for number, (once, twice) in enumerate(zip(one.terms, two.terms, strict=True)):
        if once and torch.isclose(once, twice, rtol=1e-9):
            raise ConfigError(
                f"{which}.terms must return sums over the sequences, not means: term {number} is the same "
                "for twice as many. Leave out mean(), and return the number of sequences in counts."
            )


def _told(error: Exception, objective: Objective) -> str:
    """Return an error with its line in the file of the objective."""
    file = inspect.getsourcefile(type(objective))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" at {file} line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {str(error).rstrip('.')}{where}"
