"""Faults made on purpose (`--faults`), so that what happens then can be rehearsed before a real one: docs/faults.md."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from math import nan, prod
from threading import Event
from time import sleep

import torch
from torch import Tensor

from megalite.config.rules.faults import Fault, parse_faults
from megalite.mesh import Mesh

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")  # of this process by torchrun, of the job by SLURM


def _run_out(fault: Fault) -> None:
    raise torch.OutOfMemoryError("injected: no memory is left")


BETWEEN_STEPS: dict[str, Callable[[Fault], object]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda fault: os._exit(1),
    "hang": lambda fault: Event().wait(),
    "oom": _run_out,
    "slow": lambda fault: sleep(fault.amount),
    "sigterm": lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    "sigusr1": lambda fault: os.kill(os.getpid(), signal.SIGUSR1),
}


def restarts() -> int:
    """How often this process has been started again."""
    return sum(int(os.environ.get(name, 0)) for name in RESTARTS)


class Injection:
    """The faults of a run that happen on this rank, each once per step: a step that is done again has none.

    A spike, which multiplies the loss, happens to the whole replica of the named rank: it is a property of a batch.
    """

    def __init__(self, inject: str | list[str] | None, mesh: Mesh):
        self.mesh = mesh
        restart = restarts()
        self._left = [(fault, set(fault.steps)) for fault in parse_faults(inject) if fault.restart == restart and self._concerns(fault)]

    def _concerns(self, fault: Fault) -> bool:
        peers = self.mesh.dims.peers(self.mesh.rank, ("pp", "tp")) if fault.kind == "spike" else (self.mesh.rank,)
        return fault.rank is None or fault.rank in peers

    def _due(self, step: int, kinds: Sequence[str]) -> Iterator[Fault]:
        for fault, steps in self._left:
            if step in steps and fault.kind in kinds:
                steps.remove(step)
                print(f"rank {self.mesh.rank}: injected {fault.kind} in step {step}", file=sys.stderr, flush=True)
                yield fault

    def between_steps(self, step: int) -> None:
        """What happens before a step begins. May not return."""
        for fault in self._due(step, tuple(BETWEEN_STEPS)):
            BETWEEN_STEPS[fault.kind](fault)

    def loss_factor(self, step: int) -> float:
        """What this rank's loss is multiplied by, and with it all gradients that follow from it."""
        return prod(fault.amount for fault in self._due(step, ("spike",)))

    def spoil(self, step: int, gradients: Sequence[Tensor]) -> None:
        """Break this rank's part of the reduced gradients: `gradients` are those that it counts in the norm."""
        for _ in self._due(step, ("nan",)):
            for gradient in gradients:
                gradient.fill_(nan)
