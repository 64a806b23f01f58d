"""A trial of an optimizer of the user on made-up gradients.

What is wrong with it is one message before any rank is started, and not another result on every layout.
"""

from __future__ import annotations

import inspect
import traceback

import torch
from torch import Tensor

from megalite.assembly.plan import specs_of
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.optimizer.registry import entry_of
from megalite.optimizer.state_tensors import is_positive
from megalite.optimizer.update_rule import UpdateRule, UpdateStep

ELEMENTS, STEPS = 64, 3


def try_optimizer(config: Config) -> None:
    """Check that a rank holds whole blocks of moments, and try an optimizer of the user.

    Raises:
        ConfigError: a layout cuts blocks; or the optimizer fails, is not elementwise, does not change weights
            and state in place, or changes gradients.
    """
    if config.optimizer.moments == "8bit":
        for rank in range(config.parallel.pp):
            specs_of(config, rank)
    kind = entry_of(config.optimizer.name).class_path
    if isinstance(kind, str):
        return
    which = f"optimizer.name = {config.optimizer.name}: {kind.__name__}"
    try:
        rule = kind(config.optimizer)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(ELEMENTS, dtype=torch.float64, generator=generator)
        grads = torch.randn(STEPS, ELEMENTS, dtype=torch.float64, generator=generator)
        whole = _updated(rule, which, weights, grads)
        parts = [
            _updated(rule, which, weights[own], grads[:, own])
            for own in (slice(0, ELEMENTS // 4), slice(ELEMENTS // 4, None))
        ]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{which} fails on made-up gradients: {_told(error, kind)}.") from error
    if torch.equal(whole[0], weights):
        raise ConfigError(
            f"{which}.update does not change the weights. Update them in place, as weights.sub_(…)."
        )
    for one, *others in zip(whole, *parts, strict=True):
        if not torch.allclose(one, torch.cat(others), rtol=1e-9, atol=1e-12):
            raise ConfigError(
                f"{which} is not elementwise: some elements are updated otherwise without the others, and "
                "the result would depend on the layout. Leave out sums, means and norms over elements, and "
                "state in attributes."
            )


def _updated(rule: UpdateRule, which: str, weights: Tensor, grads: Tensor) -> list[Tensor]:
    """Return weights and state after some steps. Raises ConfigError if an argument is misused."""
    weights, given = weights.clone(), grads.clone()
    state = {kind: torch.zeros_like(weights) for kind in rule.state}
    for number, grad in enumerate(given, 1):
        before, seen = dict(state), dict(state)
        rule.update(weights, grad, seen, UpdateStep(number, 1e-2, 0.1, dict.fromkeys(rule.state, number)))
        if replaced := [kind for kind in before if seen.get(kind) is not before[kind]]:
            raise ConfigError(
                f"{which}.update replaces state[{replaced[0]!r}], which is then lost. Change it in place."
            )
        if misshaped := [kind for kind in before if before[kind].shape != weights.shape]:
            raise ConfigError(
                f"{which}: state[{misshaped[0]!r}] must keep the shape of the weights, but has "
                f"{list(before[misshaped[0]].shape)} instead of {list(weights.shape)} after an update."
            )
        if negative := [kind for kind in before if is_positive(kind) and (before[kind] < 0).any()]:
            raise ConfigError(
                f"{which}: {negative[0]} is negative, but a name that ends in _sq is of numbers that never "
                "are. Rename it."
            )
    if not torch.equal(given, grads):
        raise ConfigError(f"{which}.update changes the gradients, which a repeated step needs. Copy them.")
    return [weights, *state.values()]


def _told(error: Exception, kind: type) -> str:
    """Return an error with its line in the file of the optimizer."""
    file = inspect.getsourcefile(kind)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" at {file} line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {str(error).rstrip('.')}{where}"
