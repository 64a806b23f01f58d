"""Operations that a run with train.recompute: budget recomputes.

Rank 0 decides, all ranks use the result, and it is printed when training begins.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from megalite.checkpoint.agreement import on_rank_0, raise_on_all_ranks
from megalite.config.recompute import BUDGET
from megalite.config.schema import Config
from megalite.launch.machine import local_world_size
from megalite.mesh.mesh import Mesh
from megalite.parallel.collectives import all_reduce
from megalite.planner.api import DeviceType, budget_bytes, budget_table, decide_recomputation, resolve_budget


def agreed(config: Config, mesh: Mesh, device: torch.device) -> Config:
    """Return the configuration with a list of operations instead of the budget. Collective.

    The result is the same on every rank. Raises ConfigError on every rank.
    """
    memory = _smallest(mesh, device)
    with raise_on_all_ranks(mesh):
        own = resolve_budget(config, _kind(device), memory)
    # times may differ in the last digit between hosts
    operations = on_rank_0(mesh, lambda: own.train.recompute)
    return replace(config, train=replace(config.train, recompute=operations))


def check(config: Config, device: torch.device) -> None:
    """Raise ConfigError if the budget is too small for the device of this rank.

    Called before any process group is created.
    """
    if config.train.recompute == BUDGET:
        resolve_budget(config, _kind(device), _memory(device))


def describe(config: Config, mesh: Mesh, device: torch.device) -> list[str]:
    """Describe the operations selected for a budget as lines of text. Collective."""
    if config.train.memory_budget is None:
        return []
    memory = _smallest(mesh, device)
    if mesh.rank != 0:
        return []
    return budget_table(decide_recomputation(config, budget_bytes(config, memory), device=_kind(device)))


def _kind(device: torch.device) -> DeviceType:
    return "cuda" if device.type == "cuda" else "cpu"


def _memory(device: torch.device) -> int:
    """Return the memory of this rank's device in bytes; on a CPU, this rank's share of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size()


def _smallest(mesh: Mesh, device: torch.device) -> int:
    """Return the smallest device memory of all ranks."""
    every = torch.zeros(mesh.world.size, dtype=torch.float64, device=device)
    every[mesh.rank] = _memory(device)
    return int(all_reduce(every, mesh.world).wait().min().item())
