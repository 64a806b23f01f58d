"""Fault injection (`--faults`), to test how a run handles faults; see docs/faults.md."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import nan, prod
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from megalite.config.sections.faults import Fault, parse_faults
from megalite.launch import scheduler
from megalite.launch.output import LOGS, RETURN_FILE
from megalite.mesh.mesh import Mesh

if TYPE_CHECKING:
    from megalite.parallel.pipeline.runtime import Runtime
    from megalite.parallel.recheck.runtime import RecheckedRuntime

RETURN_S = 10.0  # the longest wait for the launcher


def _run_out(fault: Fault) -> None:
    raise torch.OutOfMemoryError("injected: out of memory")


def _return(fault: Fault) -> None:
    """Tell the launcher that lost places for ranks are healthy, and wait until it has asked the ranks to
    stop, so that they do after this step."""
    if LOGS not in os.environ:
        return
    returned = Path(os.environ[LOGS], RETURN_FILE)
    returned.touch()
    given_up = monotonic() + RETURN_S
    while returned.exists() and monotonic() < given_up:
        sleep(0.01)


BETWEEN_STEPS: dict[str, Callable[[Fault], object]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda fault: os._exit(1),
    "hang": lambda fault: Event().wait(),
    "oom": _run_out,
    "slow": lambda fault: sleep(fault.amount),
    "sigint": lambda fault: os.kill(os.getpid(), signal.SIGINT),
    "sigterm": lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    "return": _return,
    "sigusr1": lambda fault: os.kill(os.getpid(), signal.SIGUSR1),
}


def restarts() -> int:
    """Return how often this process has been restarted: by torchrun, and with its job by a scheduler."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) + scheduler.restarts()


class FaultInjection:
    """Injector of this rank's faults, each once per step: a step repeated after a rollback has none.

    A spike multiplies the loss on all ranks of the given rank's replica, because it is a property of a batch.

    Args:
        runtime: into whose passes bits are flipped.
    """

    def __init__(self, inject: str | list[str] | None, mesh: Mesh, runtime: Runtime):
        self.mesh = mesh
        restart = restarts()
        self._left = [
            (fault, set(fault.steps))
            for fault in parse_faults(inject)
            if fault.restart == restart and self._concerns(fault)
        ]
        if any(fault.kind == "bitflip" for fault, _ in self._left):
            cast("RecheckedRuntime", runtime).inject = self.into_pass  # a rule requires faults.recheck

    def _concerns(self, fault: Fault) -> bool:
        peers = (
            self.mesh.dims.peers(self.mesh.rank, ("pp", "tp")) if fault.kind == "spike" else (self.mesh.rank,)
        )
        return fault.rank is None or fault.rank in peers

    def _due(self, step: int, kinds: Sequence[str], in_pass: int = 0) -> Iterator[Fault]:
        for fault, steps in self._left:
            if step in steps and fault.kind in kinds and fault.in_pass == in_pass:
                steps.remove(step)
                print(
                    f"rank {self.mesh.rank}: injected {fault.kind} in step {step}",
                    file=sys.stderr,
                    flush=True,
                )
                yield fault

    def between_steps(self, step: int) -> None:
        """Inject the faults that occur before a step begins. May not return."""
        for fault in self._due(step, tuple(BETWEEN_STEPS)):
            BETWEEN_STEPS[fault.kind](fault)

    @contextmanager
    def into_pass(self, step: int, number: int) -> Iterator[None]:
        """Inject the faults of a pass over a step, from 1."""
        with ExitStack() as flips:
            for fault in self._due(step, ("bitflip",), number):
                from megalite.training.bit_flip import BitFlip

                flips.enter_context(BitFlip(int(fault.amount), (self.mesh.rank, step)))
            yield

    def loss_factor(self, step: int) -> float:
        """Return the factor to apply to this rank's loss, and therefore to its gradients."""
        return prod(fault.amount for fault in self._due(step, ("spike",)))

    def spoil(self, step: int, gradients: Sequence[Tensor]) -> None:
        """Set an element of the reduced gradients to NaN, in each range that this rank includes in the norm.

        Not whole ranges: their padding must stay zero in later steps.
        """
        for _ in self._due(step, ("nan",)):
            for gradient in gradients:
                gradient[0] = nan
