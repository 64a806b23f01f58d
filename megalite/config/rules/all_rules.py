"""All rules in the order in which they run.

The bounds require positive sizes, so that later ones can divide by them. A message names the option, its
value, the reason and a way out:

    parallel.tp = 6 does not divide model.num_attention_heads = 32: each rank must hold whole heads.
    Legal values: 1, 2, 4, 8, 16, 32. Nearest: 4 or 8.
"""

import re
from collections.abc import Container
from copy import copy
from dataclasses import fields
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.rule import Mistakes, Rule
from megalite.config.rules import (
    adapters,
    bounds,
    graphs,
    mesh,
    mixers,
    model,
    model_and_data,
    mup,
    objectives,
    streams,
    training,
)
from megalite.config.rules.context import RuleContext
from megalite.config.schema import OPTIONS, Config
from megalite.config.sections import (
    ademamix,
    checkpoint,
    data,
    distillation,
    faults,
    logging,
    lora,
    muon,
    network,
    optimizer,
    parallel,
    preference,
    profiling,
    run,
    store,
    train,
)

MODEL_RULES: tuple[Rule, ...] = (*bounds.RULES, *model.RULES, *mup.RULES, *lora.RULES, *adapters.RULES)
"""The rules for a model and its adapters, with the bounds of all options."""
LAYOUT_RULES: tuple[Rule, ...] = (*mesh.RULES, *mixers.RULES, *parallel.RULES)
"""The rules for the layout of a model."""
RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *LAYOUT_RULES,
    *run.RULES,
    *store.RULES,
    *data.RULES,
    *streams.RULES,
    *model_and_data.RULES,
    *train.RULES,
    *objectives.RULES,
    *preference.RULES,
    *distillation.RULES,
    *optimizer.RULES,
    *muon.RULES,
    *ademamix.RULES,
    *checkpoint.RULES,
    *logging.RULES,
    *profiling.RULES,
    *network.RULES,
    *training.RULES,
    *graphs.RULES,
    *faults.RULES,
)
"""All rules; names are unique."""


def check(
    config: Config, world_size: int, local_devices: int | None = None, leave_out: Container[str] = ()
) -> None:
    """Raise ConfigError with the messages of the rules that a resolved configuration violates.

    One cause has one message: a rule that reads an option which an earlier message blames is not checked.

    Args:
        world_size: number of processes.
        local_devices: GPUs that this machine's processes will use (0: CPU; None: not known yet).
        leave_out: names of rules to skip.
    """
    blamed, mistakes = set[str](), Mistakes()
    values = {
        section.name: _guarded(section.name, getattr(config, section.name), blamed)
        for section in fields(Config)
    }
    context = RuleContext(**values, world_size=world_size, local_devices=local_devices)
    for rule in RULES:
        if rule.name in leave_out:
            continue
        try:
            if not rule.broken(context):
                continue
            message, reason = rule.describe(context), rule.reason(context)
        except _Blamed:
            continue
        except ConfigError as error:  # a description of the data that cannot be read
            mistakes.add(*error.messages)
        except Exception:  # an earlier mistake may have taken away what the rule relies on
            if not mistakes.messages:
                raise
        else:
            mistakes.add(message)
            blamed |= _named_in(f"{rule.option} {reason}")
    mistakes.report()


def _named_in(text: str) -> set[str]:
    """The options that a text names."""
    return set(re.findall(r"\w+\.\w+", text)) & OPTIONS.keys()


class _Blamed(Exception):
    """An option was read that is known to be wrong."""


def _guarded(name: str, section: Any, blamed: set[str]) -> Any:
    """A copy of a section that raises _Blamed when one of the blamed options is read."""
    kind = type(section)

    def read(self: object, key: str) -> Any:
        if f"{name}.{key}" in blamed:
            raise _Blamed
        return object.__getattribute__(self, key)

    guarded = copy(section)
    guarded.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read})
    return guarded
