"""Actions whose result or error reaches every rank, so that no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from megalite.checkpoint.errors import CheckpointError, reason
from megalite.config.errors import ConfigError

if TYPE_CHECKING:
    from megalite.mesh.mesh import Mesh

Result = TypeVar("Result")


def on_rank_0(mesh: Mesh, action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0 and return its result on every rank.

    Collective over `mesh.saving`, a process group of its own, so that it does not interleave with the
    collectives of training.

    Raises:
        CheckpointError: on every rank, if `action` failed on rank 0.
    """
    outcome: list[Any] = [None, None]  # result, error
    cause: Exception | None = None
    if mesh.world.rank == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            cause = error
            outcome[1] = reason(error)
    if mesh.saving.group is not None:
        import torch.distributed as dist

        from megalite.parallel.collectives import after_meeting

        with after_meeting("broadcast", mesh, mesh.saving):
            dist.broadcast_object_list(outcome, src=mesh.saving.ranks[0], group=mesh.saving.group)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1]) from cause
    result: Result = outcome[0]
    return result


@contextmanager
def raise_on_all_ranks(mesh: Mesh, kind: type[Exception] = ConfigError) -> Iterator[None]:
    """Run the block on every rank; it must not communicate. Collective over the world.

    Raises:
        kind: on every rank, the error of the first rank whose block raised one.
    """
    problem: Exception | None = None
    try:
        yield
    except kind as error:
        problem = error
    problems = [problem]
    if mesh.world.size > 1:
        import torch.distributed as dist

        from megalite.parallel.collectives import after_meeting

        problems = [None] * mesh.world.size
        with after_meeting("all_gather", mesh, mesh.world):
            dist.all_gather_object(problems, problem, group=mesh.world.group)
    for first in problems:
        if first is not None:
            raise first
