"""Random delays in what ranks compute and send: whatever the timing, a run must give the undelayed result, bit for bit.

The delays are put in from outside: hooks on the layers of a stage, forward and backward, and wrappers around torch.distributed's isend and
irecv, through which on gloo everything travels, collectives included. Each rank draws its own.
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

from megalite.config.load import from_dict
from megalite.training.trainer import Trainer
from megalite.training.verification import global_tensors
from tests.distributed.configs import SINGLE, config_of
from tests.distributed.jobs import mesh_of
from tests.distributed.layouts import Case
from tests.distributed.pool import RankContext, RankPool

SHARE = 0.15  # of the places where a delay is possible
MODEL: Case = {"tied": True, "kv_heads": 1, "vocab_size": 101, "layers": 8, "masked": True, "dropout": 0.1}
FULL: Case = {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "microbatches": 4}
LAYOUTS: dict[str, Case] = {
    "tp2-pp2-dp2": FULL,
    "tp2-pp2-dp2-gpipe": {**FULL, "schedule": "gpipe"},
    **{f"pp{pp}-{schedule}": {"pp": pp, "schedule": schedule, "microbatches": 8} for pp in range(2, 9) for schedule in ("1f1b", "gpipe")},
}


def delayed_job(context: RankContext, config: dict[str, Any], steps: int, seed: int, longest_s: float) -> dict[str, Any]:
    """Train under delays of up to longest_s; every rank returns losses, norms and how often it slept, rank 0 also the weights."""
    made = from_dict(config)
    trainer = Trainer(made, mesh_of(context, made))
    try:
        with delays(trainer, Random(f"{seed} {context.rank}"), longest_s) as slept:
            results = [trainer.step() for _ in range(steps)]
        tensors = global_tensors(trainer)
    finally:
        trainer.close()
    found = {"numbers": [(result.loss, result.grad_norm) for result in results], "slept": len(slept)}
    return {**found, "tensors": tensors} if context.rank == 0 else found


@contextmanager
def delays(trainer: Trainer, random: Random, longest_s: float) -> Iterator[list[float]]:
    """Sometimes sleep after a layer's forward, before its backward, and before a message; gives the seconds of every sleep."""
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

    layers = [layer for stage in trainer.parts.stages.values() for layer in stage.layers.values()]
    hooks = [layer.register_forward_hook(forward) for layer in layers]
    try:
        with patch.object(dist, "isend", late(dist.isend)), patch.object(dist, "irecv", late(dist.irecv)):
            yield slept
    finally:
        for hook in hooks:
            hook.remove()


def prove_undisturbed(layout: str, steps: int, seeds: range, longest_s: float, prefix: str, ranks: RankPool) -> None:
    """Rounds of the same steps under different delays, each bit for bit the undelayed run on every rank."""
    case = {**SINGLE, **MODEL, **LAYOUTS[layout]}
    world, config = case["tp"] * case["pp"] * case["dp"], config_of(case, prefix)
    config["train"]["steps"] = steps
    timeout = 60.0 + 5.0 * steps
    expected = ranks.run(world, delayed_job, config, steps, 0, 0.0, timeout=timeout)
    for seed in seeds:
        got = ranks.run(world, delayed_job, config, steps, seed, longest_s, timeout=timeout)
        for rank, found in enumerate(got):
            assert found["slept"] > 0
            assert found["numbers"] == expected[0]["numbers"], f"delays {seed}: losses or norms of rank {rank}"
        tensors, others = got[0]["tensors"], expected[0]["tensors"]
        differing = [name for name, value in tensors.items() if not value.equal(others[name])]
        assert not differing, f"delays {seed}: {differing}"
