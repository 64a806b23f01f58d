"""One measured process of `benchmarks.context`: `python -m benchmarks.context_run SPEC.json`, under torchrun for more than one rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch.autograd.profiler import profile

from benchmarks.measure import finish, read_spec, timed
from megalite.build import parts as build
from megalite.config.load import from_dict
from megalite.launch.process import configure_process, start_process_group, world_size
from megalite.parallel.context.exchange import pass_on
from megalite.training.trainer import Trainer

HOPS_ALONE = 20


def main() -> None:
    spec, device = read_spec(), torch.device("cpu")
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    if world_size() > 1:
        start_process_group(device, "30m")
    found: dict[str, Any] = {"memory": [most_bytes(tree) for tree in spec.get("memory", [])]}
    steps = [timed_steps(tree, spec["warmup_steps"], spec["steps"]) for tree in spec.get("steps_of", [])]
    found |= {"seconds": [seconds for seconds, _ in steps], "hidden": [hidden for _, hidden in steps]}
    finish(spec, found if world_size() == 1 or torch.distributed.get_rank() == 0 else None)


def trainer_of(tree: dict[str, Any]) -> Trainer:
    config = from_dict(tree)
    return Trainer(config, build.make_mesh(config), torch.device("cpu"))


def most_bytes(tree: dict[str, Any]) -> int:
    """The most bytes of tensors that exist at a time during the second step, above those that exist before it; the most of any rank."""
    trainer = trainer_of(tree)
    try:
        trainer.step()
        most = torch.tensor(peak_above(trainer.step))
        if world_size() > 1:
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(most)
    finally:
        trainer.close()


def peak_above(act: Callable[[], object]) -> int:
    """The most bytes that the allocator has given out at a time during a call, above what it had before."""
    with profile(profile_memory=True) as recorded:
        act()
    assert recorded.kineto_results is not None
    events = sorted((event for event in recorded.kineto_results.events() if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events), default=0)


class Waits:
    """Seconds in which a rank waits for hops, as its activity tells."""

    def __init__(self) -> None:
        self.seconds, self._since = 0.0, 0.0

    def __call__(self, place: Any) -> None:
        now = perf_counter()
        if self._since:
            self.seconds, self._since = self.seconds + now - self._since, 0.0
        if isinstance(place, str) and place.startswith("hop over cp"):
            self._since = now


def timed_steps(tree: dict[str, Any], warmup: int, steps: int) -> tuple[list[float], float | None]:
    """Seconds of each step, and with a ring the part of the hops' time that is hidden, on this rank."""
    trainer = trainer_of(tree)
    mesh, model = trainer.mesh, trainer.config.model
    try:
        timed(trainer.step, warmup, 0)
        waits = Waits()
        mesh.activity.listeners += (waits,)
        mesh.traffic.clear()
        seconds = timed(trainer.step, 0, steps)
        mesh.activity.listeners = tuple(each for each in mesh.activity.listeners if each is not waits)
        hops = mesh.traffic["hop", "cp"]
        if not hops:
            return seconds, None
        kv = torch.zeros(2, trainer.config.data.sequence_length // mesh.cp.size, 1, model.kv_heads, model.head_size)
        alone = sum(timed(lambda: pass_on(kv, mesh.cp).wait(), 2, HOPS_ALONE)) / HOPS_ALONE
        return seconds, 1 - waits.seconds / (hops * alone)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
