"""One measured run of `benchmarks.experts`: `python -m benchmarks.experts_run SPEC.json`.

More than one rank is started by torchrun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import finish, read_spec, timed
from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.launch.process import configure_process, start_process_group
from megalite.model.parameters import active_parameters
from megalite.parallel.collectives import Pending
from megalite.parallel.expert import dispatch
from megalite.training.trainer import Trainer


class DispatchClock:
    """Measures the communication time of the dispatch from its start to its end.

    The host waits for it immediately.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, function: Callable[..., Pending]) -> Callable[..., Any]:
        """Return the function with its call and the wait for its result timed."""

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            pending = function(*args)
            self.seconds += time.perf_counter() - start
            return _Watched(self, pending)

        return call


class _Watched:
    def __init__(self, clock: DispatchClock, pending: Pending):
        self.clock, self.pending = clock, pending

    def wait(self) -> torch.Tensor:
        start = time.perf_counter()
        result = self.pending.wait()
        self.clock.seconds += time.perf_counter() - start
        return result


def main() -> None:
    spec, clock, device = read_spec(), DispatchClock(), torch.device("cpu")
    config = from_dict(spec["config"])
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    start_process_group(device, config.run.timeout)
    for name in ("all_to_all", "all_gather", "reduce_scatter"):
        setattr(dispatch, name, clock.watch(getattr(dispatch, name)))
    trainer = Trainer(config, build.make_mesh(config), device)
    timed(trainer.step, 0, spec["warmup_steps"])
    clock.seconds = 0.0
    seconds = timed(trainer.step, 0, spec["steps"])
    trainer.close()
    result = {
        "seconds": seconds,
        "dispatch": clock.seconds,
        "active_parameters": active_parameters(config.model),
    }
    finish(spec, result if trainer.mesh.rank == 0 else None)


if __name__ == "__main__":
    main()
