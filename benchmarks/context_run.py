"""One measured process of `benchmarks.context`: `python -m benchmarks.context_run SPEC.json`.

More than one rank is started by torchrun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from benchmarks.measure import finish, read_spec, timed
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.launch.process import configure_process, start_process_group, world_size
from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import Pending
from megalite.parallel.context import ring
from megalite.parallel.context.ring import pass_on
from megalite.training.trainer import Trainer

HOPS_ALONE = 20


def main() -> None:
    spec, device = read_spec(), torch.device("cpu")
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    if world_size() > 1:
        start_process_group(device, "30m")
    result: dict[str, Any] = {"memory": [most_bytes(tree) for tree in spec.get("memory", [])]}
    steps = [timed_steps(tree, spec["warmup_steps"], spec["steps"]) for tree in spec.get("steps_of", [])]
    result |= {"seconds": [seconds for seconds, _ in steps], "hidden": [hidden for _, hidden in steps]}
    finish(spec, result if world_size() == 1 or torch.distributed.get_rank() == 0 else None)


def trainer_of(tree: dict[str, Any]) -> Trainer:
    config = from_dict(tree)
    return Trainer(config, build.make_mesh(config), torch.device("cpu"))


def most_bytes(tree: dict[str, Any]) -> int:
    """Return the maximum bytes of tensors during the second step, minus those that exist before it.

    The result is the maximum over ranks.
    """
    trainer = trainer_of(tree)
    try:
        trainer.step()

        def settled_step() -> None:
            trainer.step()
            trainer.drain()  # torch corrupts its heap if a message outlives the profiler that saw it start

        most = torch.tensor(peak_above(settled_step))
        if world_size() > 1:
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(most)
    finally:
        trainer.close()


def peak_above(act: Callable[[], object]) -> int:
    """Return the maximum bytes that the allocator has allocated during a call, minus those before it."""
    with profile(profile_memory=True) as recorded:
        act()
    assert recorded.kineto_results is not None
    events = sorted(
        (event for event in recorded.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    return max(accumulate(event.nbytes() for event in events), default=0)


@dataclass
class Hop:
    """A message to the next rank of the ring, with the times when this rank posted and awaited it."""

    pending: Pending
    posted: float
    waits: tuple[float, float] = (0.0, 0.0)

    def wait(self) -> Tensor:
        started = perf_counter()
        received = self.pending.wait()
        self.waits = started, perf_counter()
        return received


@contextmanager
def recorded_hops() -> Iterator[list[Hop]]:
    """Context manager that records the hops of ring attention, in the order in which they are posted.

    The order is the same on all ranks.
    """
    hops: list[Hop] = []

    def recorded(x: Tensor, axis: MeshAxis) -> Hop:
        hops.append(Hop(pass_on(x, axis), perf_counter()))
        return hops[-1]

    with patch.object(ring, "pass_on", recorded):
        yield hops


def exposed_seconds(hops: list[Hop], cp: MeshAxis) -> float:
    """Return the seconds that this rank waited for messages that both neighbors had posted.

    Before that, it waits for the computation of the neighbor. The ranks are processes on one machine and
    share its clock.
    """
    posted = [hop.posted for hop in hops]
    every: list[Any] = [None] * cp.size
    torch.distributed.all_gather_object(every, posted, group=cp.group)
    before, after = every[cp.rank - 1], every[(cp.rank + 1) % cp.size]
    both = [max(pair) for pair in zip(before, after, strict=True)]
    return sum(
        max(0.0, hop.waits[1] - max(hop.waits[0], moment)) for hop, moment in zip(hops, both, strict=True)
    )


def timed_steps(tree: dict[str, Any], warmup: int, steps: int) -> tuple[list[float], float | None]:
    """Return the seconds of each step and, with a ring, the hidden fraction of the hops' time."""
    trainer = trainer_of(tree)
    cp, model = trainer.mesh.cp, trainer.config.model
    try:
        timed(trainer.step, warmup, 0)
        with recorded_hops() as hops:
            seconds = timed(trainer.step, 0, steps)
        if not hops:
            return seconds, None
        kv = torch.zeros(
            2, trainer.config.data.sequence_length // cp.size, 1, model.kv_heads, model.head_size
        )
        alone = sum(timed(lambda: pass_on(kv, cp).wait(), 2, HOPS_ALONE)) / HOPS_ALONE
        return seconds, 1 - exposed_seconds(hops, cp) / (len(hops) * alone)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
