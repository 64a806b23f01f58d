"""All checks between options, in the order in which they run; one file for each part of a run.

The first rules require positive sizes, so that later ones can divide by them. A message names the option, its value, the reason and a way
out:

    parallel.tp = 6 does not divide model.num_attention_heads = 32: each rank must hold whole heads.
    Legal values: 1, 2, 4, 8, 16, 32. Nearest: 4 or 8.
"""

from collections.abc import Container
from dataclasses import fields

from megalite.config.rule import Rule, RuleContext
from megalite.config.rules import data, faults, model, numbers, parallel, training
from megalite.config.schema import Config, ConfigError

RULES: tuple[Rule, ...] = (*numbers.RULES, *model.RULES, *parallel.RULES, *data.RULES, *training.RULES, *faults.RULES)
"""All rules; names are unique."""


def check(config: Config, world_size: int, local_devices: int | None = None, leave_out: Container[str] = ()) -> None:
    """Raise ConfigError with the message of the first rule that a resolved configuration violates.

    world_size: number of processes; local_devices: GPUs that this machine's processes will use (0: CPU; None: not known yet).
    leave_out: names of rules to skip.
    """
    values = {section.name: getattr(config, section.name) for section in fields(Config)}
    context = RuleContext(**values, world_size=world_size, local_devices=local_devices)
    for rule in RULES:
        if rule.name not in leave_out and rule.broken(context):
            raise ConfigError(rule.describe(context))
