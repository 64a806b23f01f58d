"""Turns a choice of layout into the configuration of a run: for the rules, for the memory estimate, and for --write."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

from megalite.config.rule import RuleContext
from megalite.config.rules import RULES
from megalite.config.schema import Config, ModelConfig, ParallelConfig
from megalite.planning.step import Choice

ELSEWHERE = ("data.train", "data.validation", "run.", "checkpoint.", "faults.", "validation.", "logging.", "profiling.")
"""Options that a plan does not decide: their rules are checked only when the run starts."""


def configured(base: Config, choice: Choice) -> Config:
    """The base configuration with a choice applied."""
    changed: dict[str, Any] = {"offload": choice.offload, "schedule": choice.schedule}  # names already validated by a rule or the parser
    parallel = replace(
        base.parallel,
        **changed,
        tp=choice.tp,
        pp=choice.pp,
        dp=choice.dp,
        sequence_parallel=choice.sequence_parallel,
        zero=choice.zero,
        offload_parameters=choice.offload_parameters,
        virtual_stages=choice.asked_stages,
    )
    train = replace(base.train, micro_batch_size=choice.micro_batch_size, recompute=choice.recompute)
    return replace(base, parallel=parallel, train=train)


def broken_rule(config: Config, world_size: int) -> str | None:
    """The message of the first broken rule about options that a plan decides; None if no rule is broken."""
    facts = RuleContext(**{section.name: getattr(config, section.name) for section in fields(Config)}, world_size=world_size)
    for rule in RULES:
        if not rule.option.startswith(ELSEWHERE) and rule.broken(facts):
            return rule.describe(facts)
    return None


def tree_of(config: Config) -> dict[str, dict[str, Any]]:
    """Section → key → value of everything that differs from the defaults; a preset replaces the shape options that it sets."""
    defaults, tree = asdict(Config()), asdict(config)
    shape = asdict(ModelConfig()) if config.model.preset is None else _preset_shape(config.model.preset)
    defaults["model"] = {**shape, "preset": None}
    defaults["parallel"] = {**asdict(ParallelConfig()), **dict.fromkeys(("tp", "pp", "dp", "zero", "schedule"))}  # always written
    found = {name: {key: value for key, value in section.items() if value != defaults[name][key]} for name, section in tree.items()}
    return {name: section for name, section in found.items() if section}


def _preset_shape(name: str) -> dict[str, Any]:
    from megalite.config.presets import preset

    return asdict(ModelConfig(**preset(name)))


def to_yaml(config: Config, heading: str) -> str:
    """A file for `megalite train --config`: the heading as comments, then all options that differ from the defaults."""
    import yaml

    comments = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return comments + yaml.safe_dump(tree_of(config), sort_keys=False, allow_unicode=True, width=140)
