"""Jobs for the tests of the pool, which run on its ranks."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.support.pool import RankContext


def place(context: RankContext) -> tuple[int, int, int]:
    """Rank, world size, and the sum of all ranks from a collective."""
    total = torch.tensor([context.rank])
    if context.world > 1:
        dist.all_reduce(total)
    return context.rank, context.world, int(total)


def process(context: RankContext) -> tuple[int, int]:
    """The process id, and the number of jobs that its cache has served."""
    context.cache["jobs"] = context.cached("jobs", lambda: 0) + 1
    return os.getpid(), context.cache["jobs"]


def settings(context: RankContext) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "initialised": dist.is_initialized(),
        "policy": os.sched_getscheduler(0),
    }


def scaled(context: RankContext, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor * factor + context.rank


def fail(context: RankContext, rank: int) -> None:
    print(f"rank {context.rank} was here")
    if context.rank == rank:
        raise ValueError("no such luck")
    dist.barrier()


def hang(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        wait_for_nothing()


def wait_for_nothing() -> None:
    time.sleep(600)


def die(context: RankContext, rank: int) -> None:
    if context.rank == rank:
        os._exit(7)
    dist.barrier()


def unpicklable(context: RankContext) -> Any:
    return lambda: None
