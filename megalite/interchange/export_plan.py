"""What an export to Megatron-LM writes, in either format."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config.schema import Config
from megalite.interchange.export_state import StateToExport
from megalite.interchange.megatron_places import MegatronTensor
from megalite.interchange.megatron_spelling import Spelling


@dataclass(frozen=True)
class LegacyLayout:
    """The ranks of the legacy format. torch_dist has none: Megatron-LM reads it with any."""

    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Export:
    """What is written.

    Attributes:
        arguments: of the namespace.
        iteration: steps done.
        updates: of AdamW, or None without its state.
        samples: samples read.
        extra_state: names of empty states of fp8.
    """

    config: Config
    state: StateToExport
    tensors: Mapping[str, MegatronTensor]
    spelling: Spelling
    layout: LegacyLayout
    arguments: dict[str, Any]
    iteration: int
    updates: int | None
    samples: int
    scheduler: dict[str, Any]
    extra_state: list[str]


def param_groups(export: Export, experts_apart: bool = False) -> list[dict[str, Any]]:
    """Return the groups of an optimizer without their parameters: without and with weight decay."""
    optimizer = export.config.optimizer
    common = {
        "lr": optimizer.lr,
        "bias_correction": True,
        "betas": tuple(optimizer.betas),
        "eps": optimizer.eps,
        "lr_mult": 1.0,
        "is_expert_parallel": experts_apart,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "step": export.updates,
    }
    return [
        common | {"weight_decay": optimizer.weight_decay * multiplier, "wd_mult": multiplier}
        for multiplier in (1.0, 0.0)
    ]


def namespace(export: Export) -> Namespace:
    """Return the arguments as Megatron-LM stores them."""
    return Namespace(**export.arguments)
