"""Actions whose result or error reaches every rank, so that no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from megalite.checkpoint.errors import CheckpointError, reason
from megalite.config.errors import ConfigError

if TYPE_CHECKING:
    from megalite.mesh.mesh import Mesh, MeshAxis

Result = TypeVar("Result")


def on_rank_0(mesh: Mesh, action: Callable[[], Result], over: MeshAxis | None = None) -> Result:
    """Run `action` on rank 0 and return its result on every rank.

    Collective over `mesh.saving`, a process group of its own, so that it does not interleave with the
    collectives of training.

    Args:
        over: another axis of all ranks, in place of `mesh.saving`.

    Raises:
        CheckpointError: on every rank, if `action` failed on rank 0.
    """
    outcome: list[Any] = [None, None]  # result, error
    cause: Exception | None = None
    axis = over or mesh.saving
    if mesh.world.rank == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            cause = error
            outcome[1] = reason(error)
    if axis.group is not None:
        import torch.distributed as dist

        from megalite.parallel.collectives import after_meeting

        with after_meeting("broadcast", mesh, axis):
            dist.broadcast_object_list(outcome, src=axis.ranks[0], group=axis.group)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1]) from cause
    result: Result = outcome[0]
    return result


@contextmanager
def raise_on_all_ranks(
    mesh: Mesh, kind: type[Exception] = ConfigError, over: MeshAxis | None = None
) -> Iterator[None]:
    """Run the block on every rank; it must not communicate. Collective over the world.

    Args:
        over: another axis of all ranks, in place of `mesh.world`.

    Raises:
        kind: on every rank, the error of the first rank whose block raised one.
    """
    problem: Exception | None = None
    try:
        yield
    except kind as error:
        problem = error
    for first in gathered(problem, mesh, over):
        if first is not None:
            raise first


def gathered(own: Result, mesh: Mesh, over: MeshAxis | None = None) -> list[Result]:
    """Return the values of all ranks, in the order of ranks. Collective over the world.

    Args:
        own: this rank's value, which is pickled.
        over: another axis of all ranks, in place of `mesh.world`.
    """
    axis = over or mesh.world
    if axis.group is None:
        return [own]
    import torch.distributed as dist

    from megalite.parallel.collectives import after_meeting

    values: list[Any] = [None] * axis.size
    with after_meeting("all_gather", mesh, axis):
        dist.all_gather_object(values, own, group=axis.group)
    return values
