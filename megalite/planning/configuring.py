"""From a choice of layout to the configuration of a run: what the rules check, what memory is estimated for, and what --write writes."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

from megalite.config.rule import RuleContext
from megalite.config.rules import RULES
from megalite.config.schema import Config, ModelConfig, ParallelConfig
from megalite.planning.step import Choice

ELSEWHERE = ("data.train", "data.validation", "run.", "checkpoint.", "faults.", "validation.", "logging.", "profiling.")
"""What a plan leaves open: rules about it wait for the run."""


def configured(base: Config, choice: Choice) -> Config:
    """The base configuration under a choice."""
    changed: dict[str, Any] = {"offload": choice.offload, "schedule": choice.schedule}  # names that a rule or the parser has checked
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
    """The message of the first rule that a run would end with, of those that a plan decides; None where it would start."""
    facts = RuleContext(**{section.name: getattr(config, section.name) for section in fields(Config)}, world_size=world_size)
    for rule in RULES:
        if not rule.option.startswith(ELSEWHERE) and rule.broken(facts):
            return rule.describe(facts)
    return None


def tree_of(config: Config) -> dict[str, dict[str, Any]]:
    """Section → key → value of everything that differs from the defaults; a preset stands for the shape that it gives."""
    defaults, tree = asdict(Config()), asdict(config)
    shape = asdict(ModelConfig()) if config.model.preset is None else _preset_shape(config.model.preset)
    defaults["model"] = {**shape, "preset": None}
    defaults["parallel"] = {**asdict(ParallelConfig()), **dict.fromkeys(("tp", "pp", "dp", "zero", "schedule"))}  # what was chosen is shown
    found = {name: {key: value for key, value in section.items() if value != defaults[name][key]} for name, section in tree.items()}
    return {name: section for name, section in found.items() if section}


def _preset_shape(name: str) -> dict[str, Any]:
    from megalite.config.presets import preset

    return asdict(ModelConfig(**preset(name)))


def to_yaml(config: Config, heading: str) -> str:
    """A file for `megalite train --config`: the heading as comments, then what differs from the defaults."""
    import yaml

    comments = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return comments + yaml.safe_dump(tree_of(config), sort_keys=False, allow_unicode=True, width=140)
