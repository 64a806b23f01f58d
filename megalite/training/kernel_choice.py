"""Implementations that a run selects at its start, as printed and recorded; see `megalite_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megalite_kernels import fp8_matmul

from megalite.assembly.parts import DTYPES
from megalite.config.schema import Config
from megalite.launch import matmul_library
from megalite.model.kinds import block_kinds

if TYPE_CHECKING:
    from megalite.training.trainer import Trainer


def kernels(trainer: Trainer) -> list[str]:
    """Describe the implementations on a GPU, and of fp32 matmuls on a CPU, one per line."""
    on_cpu = trainer.device.type == "cpu" and trainer.config.train.precision == "fp32"
    return [*on_gpu(trainer), *([f"fp32 matmuls use {matmul_library.in_use()}"] if on_cpu else [])]


def on_gpu(trainer: Trainer) -> list[str]:
    """Describe the kernels that the blocks of the run take, or return no line if there is no choice."""
    config, data = trainer.config, trainer.train_data
    documents = data.chat or (config.data.reset_positions and data.eos is not None)
    return routes(config, trainer.device, documents)


def routes(config: Config, device: torch.device, documents: bool) -> list[str]:
    """Describe the kernels that a configuration's blocks take.

    Args:
        documents: whether rows contain several documents.
    """
    dtype, recipe = DTYPES[config.train.precision], config.train.fp8
    lines = [
        line for kind in block_kinds(config.model) for line in kind.routes(config, device, dtype, documents)
    ]
    if recipe != "none" and device.type != "cpu":
        lines.append(fp8_matmul.describe(device, recipe))
    return lines
