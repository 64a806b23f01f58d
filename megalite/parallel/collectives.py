"""Asynchronous collectives over a mesh axis.

Starting and waiting are separate calls, so that communication overlaps with computation. Every operation
returns a `Pending`, and its `wait()` returns the result. On an axis of size 1 nothing is communicated. The
autograd functions of `parallel.tensor` document which operations they use in forward and in backward.

On NCCL these are torch.distributed's collectives. gloo's own collectives pass each call to a worker thread,
and their order of additions depends on the offset of an element in the buffer. On gloo, therefore, each rank
exchanges directly with every other rank and adds in rank order. This is 2–3 times faster on one host, and the
sum of an element depends only on the values: all-reduce, reduce-scatter and any bucket layout are bitwise
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.system.activity import Activity
from megalite.system.shared_memory import SLOT_BYTES, PeerLost

if TYPE_CHECKING:
    from megalite.mesh.mesh import Mesh

_T = TypeVar("_T")

# up to this size, exchanging whole tensors is faster than reduce-scatter and all-gather
WHOLE_EXCHANGE_BYTES = 1 << 18

# renamed in torch 2.13
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CommunicationError(RuntimeError):
    """Raised if another rank has exited or did not respond within the time limit.

    The message contains the operation.

    Attributes:
        peer: the lost rank, or None if it is unknown, because NCCL does not report it for collectives.
        group: the ranks of the collective, if `peer` is unknown.
    """

    def __init__(self, message: str, peer: int | None, group: Sequence[int] = ()):
        super().__init__(message)
        self.peer, self.group = peer, tuple(group)


@contextmanager
def after_meeting(what: str, mesh: Mesh, over: MeshAxis) -> Iterator[None]:
    """Context manager that runs its block once all ranks have reached it.

    The block is one of torch's object collectives over `mesh.world` or `mesh.saving`. Before it, each rank
    may have worked on its host for any length of time. A failure, which is a plain RuntimeError, is converted
    to a CommunicationError.

    Args:
        what: name of the operation.
    """
    # otherwise this may be the thread of background saves, whose waits are not those of the rank
    own = over is mesh.world
    if own:
        mesh.activity.wait_for(f"{what} over world", None, limited=False)
    try:
        mesh.meet(over.name, over.group)
        yield
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        message = (
            f"rank {mesh.rank}: {what} over world failed, because a rank of the group has exited "
            f"or is not responding: {why}"
        )
        raise CommunicationError(message, None, over.ranks) from error
    if own:
        mesh.activity.arrived()


def meet(mesh: Mesh) -> None:
    """Wait until all ranks have reached this call, without a time limit for work of their hosts. Collective.

    Raises:
        CommunicationError: a rank is lost.
    """
    with after_meeting("a meeting", mesh, mesh.world):
        pass


class Work:
    """A communication with one rank (`peer`) or with all ranks of a group, started by the constructor.

    A failure, at the start or in `wait`, raises CommunicationError with the name of the operation (`what`).
    The wait is recorded in `activity`, and the tensors that are sent and received.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        what: str,
        activity: Activity,
        peer: int | None = None,
        group: Sequence[int] = (),
        sends: Tensor | None = None,
        receives: Tensor | None = None,
    ):
        self._what, self._activity, self._peer, self._group = what, activity, peer, group
        self._receives = receives
        activity.sends(what, sends)
        try:
            self._work = start()
        except RuntimeError as error:
            raise self._failure(error) from error

    def wait(self) -> None:
        self._activity.wait_for(self._what, self._peer)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        self._activity.arrived()
        self._activity.received(self._what, self._receives)

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed

    def _failure(self, error: RuntimeError) -> CommunicationError:
        who = "a rank of its group" if self._peer is None else f"rank {self._peer}"
        reason = str(error).strip().splitlines()[0]
        return CommunicationError(
            f"rank {dist.get_rank()}: {self._what} failed, because {who} has exited or is not "
            f"responding: {reason}",
            self._peer,
            self._group,
        )


class Pending:
    """A collective in flight. `wait()` returns its result and may be called once."""

    def __init__(self, works: list[Work], result: Callable[[], Tensor], held: Any = None):
        # held: buffers that must outlive the transfer
        self._works, self._result, self._held = works, result, held

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._result()


def group_work(start: Callable[[], Any], what: str, axis: MeshAxis, sends: Tensor, receives: Tensor) -> Work:
    what = f"{what} over {axis.name} (ranks {', '.join(map(str, axis.ranks))})"
    return Work(start, what, axis.activity, None, axis.ranks, sends, receives)


def _is_gloo(axis: MeshAxis) -> bool:
    return dist.get_backend(axis.group) == "gloo"


def _shared_memory_collective(
    x: Tensor, axis: MeshAxis, what: str, use: Callable[[list[Tensor]], Tensor]
) -> Pending | None:
    """Start a collective through shared memory.

    It publishes x, then applies `use` to the tensors of all ranks, in rank order.

    Returns:
        None if sockets must be used, because the ranks share no memory or x is larger than a slot.
    """
    shared = axis.shared
    if shared is None or x.nbytes > SLOT_BYTES:
        return None
    axis.activity.sends(f"{what} over {axis.name}", x)
    number = _raise_on_peer_loss(lambda: shared.publish(x), axis, what)

    def result() -> Tensor:
        parts = _raise_on_peer_loss(lambda: shared.peers(number, x), axis, what)
        axis.activity.received(f"{what} over {axis.name}", *parts)
        value = use(parts)
        shared.release(number)  # after `use`, which reads the peers' slots in place
        return value

    return Pending([], result)


def _raise_on_peer_loss(act: Callable[[], _T], axis: MeshAxis, what: str) -> _T:
    """Return act(). Raises CommunicationError if a rank is lost."""
    axis.activity.wait_for(f"{what} over {axis.name}", None)
    try:
        result = act()
    except PeerLost as error:
        peer = axis.ranks[error.peer]
        raise CommunicationError(
            f"rank {dist.get_rank()}: {what} over {axis.name} failed, because rank {peer} was lost: {error}",
            peer,
        ) from error
    axis.activity.arrived()
    return result


def reduces_in_place(axis: MeshAxis) -> bool:
    """Return whether a reduction over the axis requires no memory in addition to its buffer."""
    return axis.size == 1 or not _is_gloo(axis)


def exchange(outgoing: list[Tensor], incoming: list[Tensor], axis: MeshAxis, what: str) -> list[Work]:
    """Exchange tensors with all other ranks of the axis.

    outgoing[i] is sent to, and incoming[i] received from, the i-th rank. Empty tensors are not sent.
    """
    works, what = [], f"{what} over {axis.name}"
    # each rank starts with its neighbor, so that no rank is the first target of all
    for step in range(1, axis.size):
        source, target = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
        if incoming[source].numel():
            receive = partial(dist.irecv, incoming[source], axis.ranks[source], group=axis.group)
            works.append(Work(receive, what, axis.activity, axis.ranks[source], receives=incoming[source]))
        if outgoing[target].numel():
            send = partial(dist.isend, outgoing[target], axis.ranks[target], group=axis.group)
            works.append(Work(send, what, axis.activity, axis.ranks[target], sends=outgoing[target]))
    return works


def _received(axis: MeshAxis) -> int:
    """Return the index of one of the first two parts that is a receive buffer and may be overwritten.

    This rank's own part belongs to the caller.
    """
    return 0 if axis.rank == 1 else 1


def _ordered_sum(parts: Sequence[Tensor], dtype: torch.dtype, reuse: int | None = None) -> Tensor:
    """Sum in list order, floating-point numbers in at least fp32. The result has `dtype`.

    Args:
        reuse: index of a part that may be overwritten, 0 or 1.
    """
    accumulate_dtype = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    first, second = parts[0].to(accumulate_dtype), parts[1].to(accumulate_dtype)
    total = first + second if reuse is None else torch.add(first, second, out=(first, second)[reuse])
    for part in parts[2:]:
        total += part.to(accumulate_dtype)
    return total.to(dtype)


def message(
    operation: Callable[..., Any], x: Tensor, peer: int, group: Any, what: str, activity: Activity
) -> Work:
    """Start dist.isend or dist.irecv with a rank.

    On NCCL it is a batch of one operation, which uses the communicator of the group. A plain isend would
    lazily create a communicator for the pair of ranks.
    """
    sends, receives = (x, None) if operation is dist.isend else (None, x)
    start = partial(operation, x, peer, group=group)
    if dist.get_backend(group) != "gloo":
        start = partial(lambda one: dist.batch_isend_irecv([one])[0], dist.P2POp(operation, x, peer, group))
    return Work(start, what, activity, peer, (), sends, receives)


def all_reduce(x: Tensor, axis: MeshAxis, into: Tensor | None = None, disposable: bool = False) -> Pending:
    """Sum x over the axis into a new tensor, or into `into` (which may be x itself).

    Args:
        disposable: whether the caller does not use x again, so that NCCL may reduce it in place.
    """
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["all_reduce", axis.name] += 1
    x = x.contiguous()
    if not _is_gloo(axis):
        out = x if disposable or into is x else x.clone() if into is None else into.copy_(x)
        start = partial(dist.all_reduce, out, group=axis.group, async_op=True)
        return Pending([group_work(start, "all_reduce", axis, x, out)], lambda: out)
    if axis.size == 2 or x.nbytes <= WHOLE_EXCHANGE_BYTES or x.numel() % axis.size:
        if pending := _shared_memory_collective(
            x, axis, "all_reduce", lambda parts: _deliver(_ordered_sum(parts, x.dtype), into)
        ):
            return pending
        parts = [x if rank == axis.rank else torch.empty_like(x) for rank in range(axis.size)]
        works = exchange([x] * axis.size, parts, axis, "all_reduce")
        return Pending(works, lambda: _deliver(_ordered_sum(parts, x.dtype, _received(axis)), into), x)
    # Reduce-scatter and all-gather send (size - 1) / size of x each; the exchange above sends it size - 1
    # times.
    scattered = _scatter_sum(x.view(-1), axis, x.dtype)

    def gather() -> Tensor:
        return _deliver(_gather(scattered.wait(), axis).wait().view(x.shape), into)

    return Pending([], gather)


def all_reduce_max(x: Tensor, axis: MeshAxis) -> Pending:
    """Compute the elementwise maximum of integers over the axis, as a new tensor."""
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["all_reduce", axis.name] += 1
    if _is_gloo(axis):
        parts = [x if rank == axis.rank else torch.empty_like(x) for rank in range(axis.size)]
        works = exchange([x] * axis.size, parts, axis, "all_reduce")
        return Pending(works, lambda: torch.stack(parts).amax(0))
    out = x.clone()
    largest = partial(dist.all_reduce, out, dist.ReduceOp.MAX, group=axis.group, async_op=True)
    return Pending([group_work(largest, "all_reduce", axis, x, out)], lambda: out)


def all_reduce_together(tensors: Sequence[Tensor], axis: MeshAxis) -> Callable[[], list[Tensor]]:
    """Start summing tensors of one dtype over the axis, in one collective.

    Returns:
        a function that waits for the sums and returns them as new tensors.
    """
    sizes = [tensor.numel() for tensor in tensors]
    # a multiple of the axis's size can be reduce-scattered
    padding = tensors[0].new_zeros(-sum(sizes) % axis.size)
    pending = all_reduce(
        torch.cat([*(tensor.reshape(-1) for tensor in tensors), padding]), axis, disposable=True
    )
    return lambda: [
        part.view(like.shape)
        for part, like in zip(pending.wait().split([*sizes, padding.numel()]), tensors, strict=False)
    ]


def _deliver(value: Tensor, into: Tensor | None) -> Tensor:
    return value if into is None else into.copy_(value)


def _scatter_sum(x: Tensor, axis: MeshAxis, dtype: torch.dtype) -> Pending:
    """Compute this rank's part (along dim 0) of the sum, added locally in rank order, in `dtype`."""
    outgoing = list(x.chunk(axis.size))

    def added(whole: list[Tensor]) -> Tensor:
        return _ordered_sum([each.chunk(axis.size)[axis.rank] for each in whole], dtype)

    if pending := _shared_memory_collective(x, axis, "reduce_scatter", added):
        return pending
    if not _is_gloo(axis):
        from megalite.parallel.summed_parts import summed_parts

        return summed_parts(x, axis, dtype)
    parts = [
        outgoing[rank] if rank == axis.rank else torch.empty_like(outgoing[0]) for rank in range(axis.size)
    ]
    works = exchange(outgoing, parts, axis, "reduce_scatter")
    return Pending(works, lambda: _ordered_sum(parts, dtype, _received(axis)), x)


def _gather(x: Tensor, axis: MeshAxis, into: Tensor | None = None) -> Pending:
    """Concatenate the tensors of all ranks along dim 0: all_gather on gloo."""
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if into is None else into
    parts = list(out.chunk(axis.size))
    if into is None and (
        pending := _shared_memory_collective(x, axis, "all_gather", lambda parts: torch.cat(parts, out=out))
    ):
        return pending
    works = exchange([x] * axis.size, parts, axis, "all_gather")
    if parts[axis.rank].data_ptr() != x.data_ptr():  # otherwise x is this rank's part of `into`
        parts[axis.rank].copy_(x)
    return Pending(works, lambda: out, x)


def reduce_scatter(
    x: Tensor, axis: MeshAxis, into: Tensor | None = None, comm_dtype: torch.dtype | None = None
) -> Pending:
    """Compute this rank's part of the sum over the axis: [n, …] -> [n / size, …].

    n must be divisible by the size of the axis.

    Args:
        comm_dtype: values are cast to this before they are sent, including those that this rank keeps, so
            that a sum does not depend on the rank that computes it. They are added in rank order in at least
            fp32 on every backend: NCCL's own reduce-scatter would round the sum at each rank of its ring.
    """
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["reduce_scatter", axis.name] += 1
    x = x.contiguous()
    if comm_dtype is not None or _is_gloo(axis):
        pending = _scatter_sum(x if comm_dtype is None else x.to(comm_dtype), axis, x.dtype)
        return Pending([], lambda: _deliver(pending.wait(), into))
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) if into is None else into
    start = partial(reduce_scatter_into, out, x, group=axis.group, async_op=True)
    return Pending([group_work(start, "reduce_scatter", axis, x, out)], lambda: out, x)


def all_gather(x: Tensor, axis: MeshAxis, into: Tensor | None = None) -> Pending:
    """Concatenate the tensors of all ranks along dim 0: [n, …] -> [n · size, …].

    Args:
        into: buffer for the result. x may be a view of this rank's part of it.
    """
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["all_gather", axis.name] += 1
    x = x.contiguous()
    if _is_gloo(axis):
        return _gather(x, axis, into)
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if into is None else into
    start = partial(all_gather_into, out, x, group=axis.group, async_op=True)
    return Pending([group_work(start, "all_gather", axis, x, out)], lambda: out, x)
