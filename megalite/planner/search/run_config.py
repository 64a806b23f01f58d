"""Turns a choice of layout into the configuration of a run: for the rules, for the memory estimate, and for
--write."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from megalite.assembly.teacher import check_teacher
from megalite.config.errors import ConfigError
from megalite.config.help import field_docs
from megalite.config.load import to_dict
from megalite.config.recompute import BUDGET, shown
from megalite.config.rules import RULES
from megalite.config.rules.context import RuleContext
from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.parallel import ParallelConfig
from megalite.planner.time.step import LayoutChoice

USABLE = 0.93
"""Fraction of a device's memory that a plan may use: the driver's context, NCCL's buffers and fragmentation
take the rest."""
COLUMN, WIDTH = 38, 140
ELSEWHERE = (
    "data.train",
    "data.validation",
    "run.",
    "checkpoint.",
    "faults.",
    "validation.",
    "logging.",
    "profiling.",
)
"""Options that a plan does not decide: their rules are checked only when the run starts."""


def apply_layout(base: Config, choice: LayoutChoice) -> Config:
    """Return the base configuration with a layout."""
    changed: dict[str, Any] = {
        "offload": choice.offload,
        "schedule": choice.schedule,
        "context": choice.context,
        "expert_dispatch": choice.expert_dispatch,
        "context_parts": choice.context_parts,
    }  # names already validated by a rule or the parser
    parallel = replace(
        base.parallel,
        **changed,
        tp=choice.tp,
        pp=choice.pp,
        dp=choice.dp,
        cp=choice.cp,
        ep=choice.ep,
        context_inner=choice.context_inner,
        sequence_parallel=choice.sequence_parallel,
        zero=choice.zero,
        dp_shard=choice.dp_shard,
        offload_parameters=choice.offload_parameters,
        virtual_stages=choice.asked_stages,
    )
    budget = USABLE if choice.recompute == BUDGET else None
    train = replace(
        base.train, micro_batch_size=choice.micro_batch_size, recompute=choice.recompute, memory_budget=budget
    )
    return replace(base, parallel=parallel, train=train)


def to_run_config(base: Config, choice: LayoutChoice, room: float) -> Config:
    """Return the configuration that runs a layout.

    It has a budget of `room` bytes in place of the operations that the budget led to.
    """
    config = apply_layout(base, choice)
    if shown(choice.recompute) != BUDGET:
        return config
    return replace(config, train=replace(config.train, recompute=BUDGET, memory_budget=float(int(room))))


def first_broken_rule(config: Config, world_size: int) -> str | None:
    """Return the message of the first broken rule about options that a plan sets; None if there is none.

    A second model must fit the layout as well.
    """
    facts = RuleContext(
        **{section.name: getattr(config, section.name) for section in fields(Config)}, world_size=world_size
    )
    for rule in RULES:
        if not rule.option.startswith(ELSEWHERE) and rule.broken(facts):
            return rule.describe(facts)
    try:
        check_teacher(config, world_size)
    except ConfigError as error:
        return str(error)
    return None


def nodes_for(gpus: int, per_node: int) -> int:
    """Return the smallest number of nodes over which the GPUs can be spread evenly."""
    return next(nodes for nodes in range(math.ceil(gpus / per_node), gpus + 1) if gpus % nodes == 0)


def tree_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return the options that differ from the defaults: section → key → value.

    A preset or model.from_hf replaces the shape that it defines.
    """
    defaults, tree = asdict(Config()), to_dict(config)
    defaults["model"] = {**_shape(config.model), "preset": None, "from_hf": None}
    # always written
    defaults["parallel"] = {
        **asdict(ParallelConfig()),
        **dict.fromkeys(("tp", "pp", "dp", "zero", "schedule")),
    }
    changed = {
        name: {key: value for key, value in section.items() if value != defaults[name][key]}
        for name, section in tree.items()
    }
    return {name: section for name, section in changed.items() if section}


def _shape(model: ModelConfig) -> dict[str, Any]:
    from megalite.families.model_config import hf_shape
    from megalite.families.presets import preset

    given = (
        preset(model.preset)
        if model.preset is not None
        else hf_shape(model.from_hf)
        if model.from_hf is not None
        else {}
    )
    return asdict(ModelConfig(**given))


def to_yaml(config: Config, heading: str) -> str:
    """Return a file for `megalite train --config`.

    It has the heading as comments, then all options that differ from the defaults.
    """
    import yaml

    comments = "".join(f"# {line}".rstrip() + "\n" for line in heading.splitlines())
    return comments + yaml.safe_dump(tree_of(config), sort_keys=False, allow_unicode=True, width=140)


def to_commented_yaml(
    config: Config, heading: str, replaced: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the file of `to_yaml` with the documentation of each option.

    Args:
        replaced: section.key → the text to write instead of the option's value.
    """
    docs, lines = field_docs(), [f"# {line}".rstrip() for line in heading.splitlines()]
    for section, options in tree_of(config).items():
        lines += ["", f"{section}:"]
        for key, value in options.items():
            name = f"{section}.{key}"
            text = f"  {key}: {_flow(replaced.get(name, value))}"
            remark = f"# {_first_sentence(docs[name])}"
            beside = f"{text:{COLUMN}}  {remark}"
            lines += (
                [beside]
                if len(beside) <= WIDTH
                else [*(f"  {line}" for line in wrap(remark, WIDTH - 4, subsequent_indent="# ")), text]
            )
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Format a value on one line."""
    import yaml

    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True))
        .removesuffix("...\n")
        .strip()
    )


def _first_sentence(doc: str) -> str:
    text = " ".join(doc.replace("%%", "%").split())
    sentence = re.match(r"(.+?[^.]\.)(?= [A-Z]|$)", text)
    return sentence[1] if sentence else text
