"""Random delays in computation and communication: with any timing, a run must give the undelayed result, bit for bit.

The delays are injected from outside: hooks on the layers of a stage, forward and backward, a pause before each weight
pass, and wrappers around torch.distributed's isend and irecv, which on gloo carry everything, including collectives.
Each rank draws its own delays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from random import Random
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of
from tests.support.jobs import make_trainer
from tests.support.pool import RankContext, RankPool
from tests.support.spaces.layouts import OPTIONS, Case, with_layers

SHARE = 0.15  # fraction of the possible places that are delayed
CLIP = 1.1  # gradient norms exceed this within a few steps: optimistic updates are right at first, and then wrong
MODEL: Case = {"tied": True, "kv_heads": 1, "vocab_size": 101, "masked": True, "dropout": 0.1, "uneven": False}
FULL: Case = {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "microbatches": 4}
SCHEDULES = OPTIONS["schedule"]
LAYOUTS: dict[str, Case] = {
    **{f"tp2-pp2-dp2-{schedule}": {**FULL, "schedule": schedule} for schedule in SCHEDULES},
    **{
        f"pp{pp}-{schedule}": {"pp": pp, "schedule": schedule, "microbatches": 8}
        for pp in range(2, 9)
        for schedule in SCHEDULES
    },
}


def delayed_job(
    context: RankContext, config: dict[str, Any], steps: int, seed: int, longest_s: float
) -> dict[str, Any]:
    """Train under delays of up to longest_s, without extra waits if the schedule updates optimistically.

    Every rank returns losses, norms, its number of sleeps and of steps left open; rank 0 also the weights.
    """
    trainer = make_trainer(context, config)
    try:
        with delays(trainer, Random(f"{seed} {context.rank}"), longest_s) as slept:
            results, ahead = [], 0
            for step in range(steps):
                results += trainer.train_step(wait=step == steps - 1)
                ahead += trainer.weight_updater.pending is not None
        tensors = global_tensors(trainer)
    finally:
        trainer.close()
    numbers = [(result.loss, result.grad_norm) for result in results]
    measured = {"numbers": numbers, "slept": len(slept), "ahead": ahead}
    return {**measured, "tensors": tensors} if context.rank == 0 else measured


@contextmanager
def delays(trainer: Trainer, random: Random, longest_s: float) -> Iterator[list[float]]:
    """Sometimes sleep after a layer's forward and before its backward, a weight pass or a message; yields the list of
    sleeps in seconds."""
    slept: list[float] = []

    def pause() -> None:
        if longest_s and random.random() < SHARE:
            slept.append(random.uniform(0.0, longest_s))
            time.sleep(slept[-1])

    def forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        pause()
        if output.requires_grad:
            output.register_hook(lambda gradient: pause())

    def late(operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def started(*args: Any, **options: Any) -> Any:
            pause()
            return operation(*args, **options)

        return started

    queue = trainer.store.weight_grads
    queue.run = late(queue.run)  # type: ignore[method-assign]
    layers = [layer for stage in trainer.parts.stages.values() for layer in stage.layers.values()]
    hooks = [layer.register_forward_hook(forward) for layer in layers]
    try:
        with patch.object(dist, "isend", late(dist.isend)), patch.object(dist, "irecv", late(dist.irecv)):
            yield slept
    finally:
        for hook in hooks:
            hook.remove()


def prove_undisturbed(layout: str, steps: int, seeds: range, longest_s: float, prefix: str, ranks: RankPool) -> None:
    """Rounds of the same steps under different delays; each must equal the undelayed run bit for bit on every rank."""
    case = with_layers({**SINGLE, **MODEL, **LAYOUTS[layout]})
    world, config = case["tp"] * case["pp"] * case["dp"], config_of(case, prefix)
    config["train"] |= {"steps": steps, "grad_clip": CLIP}
    timeout = 300.0 + 5.0 * steps
    expected = ranks.run(world, delayed_job, config, steps, 0, 0.0, timeout=timeout)
    for seed in seeds:
        got = ranks.run(world, delayed_job, config, steps, seed, longest_s, timeout=timeout)
        for rank, result in enumerate(got):
            assert result["slept"] > 0 and (result["ahead"] > 0) == (case["schedule"] in ("zb-h2", "zb-v"))
            assert result["numbers"] == expected[0]["numbers"], f"delays {seed}: losses or norms of rank {rank}"
        tensors, others = got[0]["tensors"], expected[0]["tensors"]
        differing = [name for name, value in tensors.items() if not value.equal(others[name])]
        assert not differing, f"delays {seed}: {differing}"
