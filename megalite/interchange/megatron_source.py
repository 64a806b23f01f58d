"""A checkpoint of Megatron-LM, opened: its arguments, its position in training, and its tensors by kind."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointError
from megalite.config.sections.model import ModelConfig
from megalite.interchange.megatron_places import HEAD, MegatronTensor
from megalite.interchange.megatron_spelling import Spelling

MODEL, MASTER = "model", "fp32_param"
MOMENTS = ("exp_avg", "exp_avg_sq")
TRACKER = "latest_checkpointed_iteration.txt"
UNREAD = re.compile(
    r"_extra_state(/|$)|rotary_pos_emb\.inv_freq$|^rng_state|^rerun_state_machine_state|local_tokens_per_expert$"
)
"""Tensors and objects that are not weights: states of fp8 and of random numbers, and frequencies."""
MTP = ("mtp.",)
WITHOUT = "import the weights alone with --weights_only"


class MegatronSource(Protocol):
    """A checkpoint of either format.

    Attributes:
        directory: of the iteration.
        spelling: of its names.
        format: torch_dist or legacy.
        extra_state: names of the states of fp8, which are not read: an export has the same, empty.
        layout: sizes of tp, pp and virtual_stages of the legacy format; empty for torch_dist.
        facts: its values besides tensors.
    """

    directory: Path
    spelling: Spelling
    format: str
    extra_state: list[str]
    layout: dict[str, int]
    facts: Facts

    def locate(
        self, model: ModelConfig, tensors: Mapping[str, MegatronTensor], *, mtp: bool, optimizer: bool
    ) -> None:
        """Find all tensors of a model, without reading them.

        Args:
            mtp: reject MTP modules; False: leave them out.
            optimizer: find the state of the optimizer, too.

        Raises:
            CheckpointError: tensors are missing, unknown, or have another shape; the state of the optimizer
                has a form that is not supported.
        """

    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that `locate` has found: MODEL, MASTER, MOMENTS."""

    def has(self, kind: str, tensor: MegatronTensor) -> bool:
        """Whether there is a tensor of a kind; 16-bit parameters alone have a MASTER."""

    def read(self, kind: str, tensor: MegatronTensor) -> Tensor:
        """Return a whole tensor. Embedding and head may have further rows, of padding."""

    def dtype(self, tensor: MegatronTensor) -> torch.dtype:
        """The dtype of a weight."""

    def rows(self) -> int:
        """The number of rows of the embedding, padding included."""


@dataclass(frozen=True)
class Facts:
    """The values of a checkpoint besides tensors.

    Attributes:
        arguments: of the command line, by the name in its namespace; empty if there are none.
        iteration: steps done.
        step: updates of Adam, or None without state of an optimizer.
        samples: samples read.
        scheduler: state of the schedule of the learning rate.
        loss_scale: state of the scaler of losses, in fp16.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0
    step: int | None = None
    samples: int | None = None
    scheduler: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)


def facts_of(common: Mapping[str, Any], file: Path, step: int | None) -> Facts:
    """Return the facts in the dictionary of a checkpoint.

    Raises CheckpointError.
    """
    arguments = common.get("args")
    plain = dict(vars(arguments)) if isinstance(arguments, Namespace) else {}
    iteration = common.get("iteration", 0)
    if type(iteration) is not int or iteration < 0:
        raise CheckpointError(
            f"{file} is damaged: expected a number of steps as iteration, found {iteration!r}"
        )
    scheduler = common.get("opt_param_scheduler")
    samples = plain.get("consumed_train_samples")
    return Facts(
        plain,
        iteration,
        step,
        samples if type(samples) is int else None,
        dict(scheduler) if isinstance(scheduler, dict) else {},
        scaler_of(common.get("optimizer")),
    )


def scaler_of(optimizer: Any) -> dict[str, Any]:
    """Return the state of the scaler of losses in the state of an optimizer, or an empty one."""
    first = optimizer[0] if isinstance(optimizer, list) and optimizer else optimizer
    first = first.get(0, first) if isinstance(first, dict) else {}
    scaler = first.get("grad_scaler") if isinstance(first, dict) else None
    return dict(scaler) if isinstance(scaler, dict) else {}


def iteration_directory(directory: Path) -> Path:
    """Return the directory of the iteration that the tracker names, or the directory itself.

    Raises CheckpointError.
    """
    tracker = directory / TRACKER
    if not directory.is_dir():
        raise CheckpointError(f"There is no directory {directory}")
    if not tracker.is_file():
        return directory
    text = tracker.read_text(errors="replace", encoding="utf-8").strip()
    name = text if text == "release" else f"iter_{int(text):07d}" if text.isdigit() else None
    if name is None:
        raise CheckpointError(f"{tracker} is damaged: expected a number or release, found {text!r}")
    if not (directory / name).is_dir():
        raise CheckpointError(f"{tracker} names iteration {text}, but {directory / name} does not exist")
    return directory / name


def check_known(names: Iterable[str], known: set[str], directory: Path, *, mtp: bool) -> None:
    """Raise CheckpointError for tensors that the model does not have.

    Args:
        mtp: reject MTP modules, too.
    """
    for name in names:
        if name in known or UNREAD.search(name):
            continue
        if name.startswith(MTP):
            if mtp:
                raise CheckpointError(
                    f"{directory}: {name} belongs to a multi-token prediction module, which is not imported "
                    "from Megatron-LM. Leave these out with --drop_mtp."
                )
            continue
        if name.endswith(("_w", "_v")):
            raise CheckpointError(
                f"{directory}: {name} is a half of a gated matrix (singleton_local_shards), which is not "
                "supported. Save the checkpoint without this setting."
            )
        if ".experts.weight1" in name or ".experts.weight2" in name:
            raise CheckpointError(
                f"{directory}: {name} holds all experts transposed (--moe-use-legacy-grouped-gemm), which "
                "is not "
                "supported in the legacy format. Save the checkpoint with --ckpt-format torch_dist."
            )
        raise CheckpointError(
            f"{directory}: {name} is not a tensor of the model that its arguments describe. Pass the right "
            "shape "
            "with --model."
        )


def is_tied_copy(name: str, model: ModelConfig) -> bool:
    """Whether a name is the copy of a tied embedding that the last stage has."""
    return name == HEAD and model.tied_head
