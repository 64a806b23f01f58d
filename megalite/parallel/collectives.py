"""Asynchronous collectives over a mesh axis: start and wait are separate calls, so that communication
overlaps with computation.

Every operation returns a `Pending`, whose `wait()` returns the result. On an axis of size 1 nothing is
communicated. The autograd functions of `parallel.tensor` use these operations in forward and in backward, and
state which.

On NCCL these are torch.distributed's collectives. gloo's own collectives pass each call to a worker thread,
and their order of additions depends on an element's offset in the buffer. On gloo, therefore, each rank
exchanges directly with every other rank and adds in rank order. That is 2–3 times faster on one host, and the
sum of an element depends only on the values: all-reduce, reduce-scatter and any bucket layout agree bit for
bit.
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

# up to this size one exchange of whole tensors is faster than reduce-scatter and all-gather
WHOLE_EXCHANGE_BYTES = 1 << 18

# renamed in torch 2.13
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CommunicationError(RuntimeError):
    """Another rank has ended, or did not answer within the time limit; the message names the operation and
    the rank (`peer`, if known)."""

    def __init__(self, message: str, peer: int | None):
        super().__init__(message)
        self.peer = peer


@contextmanager
def after_meeting(what: str, mesh: Mesh, over: MeshAxis) -> Iterator[None]:
    """Run the block, one of torch's object collectives over `mesh.world` or `mesh.saving`, once all ranks are
    there: before it, each may have worked on its host for as long as it takes. Converts a failure, a plain
    RuntimeError, to a CommunicationError. what: the operation.
    """
    # else this may be the thread of background saves, whose waits are not the rank's
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
        raise CommunicationError(message, None) from error
    if own:
        mesh.activity.arrived()


def meet(mesh: Mesh) -> None:
    """Wait until all ranks are here, however long work of their hosts takes. Collective. Raises
    CommunicationError."""
    with after_meeting("a meeting", mesh, mesh.world):
        pass


class Work:
    """An operation with one rank, or with all of a group (`peer` None). The constructor starts it.

    A failure, at the start or in `wait`, raises CommunicationError with the operation's name (`what`).
    `activity` records the wait.
    """

    def __init__(self, start: Callable[[], Any], what: str, activity: Activity, peer: int | None = None):
        self._what, self._activity, self._peer = what, activity, peer
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


def group_work(start: Callable[[], Any], what: str, axis: MeshAxis) -> Work:
    return Work(start, f"{what} over {axis.name} (ranks {', '.join(map(str, axis.ranks))})", axis.activity)


def _is_gloo(axis: MeshAxis) -> bool:
    return dist.get_backend(axis.group) == "gloo"


def _shared_memory_collective(
    x: Tensor, axis: MeshAxis, what: str, use: Callable[[list[Tensor]], Tensor]
) -> Pending | None:
    """A collective through shared memory: publish x, then apply `use` to the tensors of every rank, in rank
    order.

    Returns None if sockets must be used: the ranks share no memory, or x is larger than a slot.
    """
    shared = axis.shared
    if shared is None or x.nbytes > SLOT_BYTES:
        return None
    number = _raise_on_peer_loss(lambda: shared.publish(x), axis, what)

    def result() -> Tensor:
        value = use(_raise_on_peer_loss(lambda: shared.peers(number, x), axis, what))
        shared.release(number)  # after `use`, which reads the peers' slots in place
        return value

    return Pending([], result)


def _raise_on_peer_loss(act: Callable[[], _T], axis: MeshAxis, what: str) -> _T:
    """Returns act(). Raises CommunicationError if a rank is lost."""
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
    """Whether a reduction over the axis needs no memory besides its buffer."""
    return axis.size == 1 or not _is_gloo(axis)


def exchange(outgoing: list[Tensor], incoming: list[Tensor], axis: MeshAxis, what: str) -> list[Work]:
    """Send outgoing[i] to, and receive incoming[i] from, the i-th rank of the axis, for all ranks but this
    one. Empty tensors are not sent."""
    works, what = [], f"{what} over {axis.name}"
    # each rank starts with its own neighbour, so that no rank is the first target of all
    for step in range(1, axis.size):
        source, target = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
        if incoming[source].numel():
            receive = partial(dist.irecv, incoming[source], axis.ranks[source], group=axis.group)
            works.append(Work(receive, what, axis.activity, axis.ranks[source]))
        if outgoing[target].numel():
            send = partial(dist.isend, outgoing[target], axis.ranks[target], group=axis.group)
            works.append(Work(send, what, axis.activity, axis.ranks[target]))
    return works


def _received(axis: MeshAxis) -> int:
    """Index of one of the first two parts that is a receive buffer, and may be overwritten: this rank's own
    part is the caller's."""
    return 0 if axis.rank == 1 else 1


def _ordered_sum(parts: Sequence[Tensor], dtype: torch.dtype, reuse: int | None = None) -> Tensor:
    """Sum in list order, floating-point numbers in at least fp32; the result has `dtype`. Part `reuse`, 0 or
    1, may be overwritten."""
    accumulate_dtype = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    first, second = parts[0].to(accumulate_dtype), parts[1].to(accumulate_dtype)
    total = first + second if reuse is None else torch.add(first, second, out=(first, second)[reuse])
    for part in parts[2:]:
        total += part.to(accumulate_dtype)
    return total.to(dtype)


def message(
    operation: Callable[..., Any], x: Tensor, peer: int, group: Any, what: str, activity: Activity
) -> Work:
    """Start dist.isend or dist.irecv with a rank.

    On NCCL as a batch of one: that uses the group's communicator, where a plain isend would lazily create one
    for the pair of ranks.
    """
    if dist.get_backend(group) == "gloo":
        return Work(lambda: operation(x, peer, group=group), what, activity, peer)
    return Work(
        lambda: dist.batch_isend_irecv([dist.P2POp(operation, x, peer, group)])[0], what, activity, peer
    )


def all_reduce(x: Tensor, axis: MeshAxis, into: Tensor | None = None, disposable: bool = False) -> Pending:
    """The sum of x over the axis, in a new tensor of x's shape, or in `into` (which may be x itself).

    disposable: the caller does not use x again, so NCCL reduces it in place.
    """
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["all_reduce", axis.name] += 1
    x = x.contiguous()
    if not _is_gloo(axis):
        out = x if disposable or into is x else x.clone() if into is None else into.copy_(x)
        return Pending(
            [group_work(lambda: dist.all_reduce(out, group=axis.group, async_op=True), "all_reduce", axis)],
            lambda: out,
        )
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


def all_reduce_together(tensors: Sequence[Tensor], axis: MeshAxis) -> Callable[[], list[Tensor]]:
    """Start summing tensors of one dtype over the axis, in one collective. Returns a function that waits for
    the sums (new tensors)."""
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
    """This rank's part (along dim 0) of the sum, added locally in rank order; the result has `dtype`."""
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
    """all_gather on gloo: the ranks' tensors, concatenated along dim 0."""
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if into is None else into
    parts = list(out.chunk(axis.size))
    if into is None and (
        pending := _shared_memory_collective(x, axis, "all_gather", lambda parts: torch.cat(parts, out=out))
    ):
        return pending
    works = exchange([x] * axis.size, parts, axis, "all_gather")
    if parts[axis.rank].data_ptr() != x.data_ptr():  # else x is this rank's part of `into`
        parts[axis.rank].copy_(x)
    return Pending(works, lambda: out, x)


def reduce_scatter(
    x: Tensor, axis: MeshAxis, into: Tensor | None = None, comm_dtype: torch.dtype | None = None
) -> Pending:
    """This rank's part of the sum over the axis: [n, …] -> [n / size, …]; the axis's size must divide n.

    comm_dtype: values are cast to this before they are sent, this rank's own, too, so that a sum does not
    depend on the rank that computes it. They are added in rank order in at least fp32 on every backend:
    NCCL's own reduce-scatter would round the sum at each rank on its ring.
    """
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["reduce_scatter", axis.name] += 1
    x = x.contiguous()
    if comm_dtype is not None or _is_gloo(axis):
        pending = _scatter_sum(x if comm_dtype is None else x.to(comm_dtype), axis, x.dtype)
        return Pending([], lambda: _deliver(pending.wait(), into))
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:])) if into is None else into
    work = group_work(
        lambda: reduce_scatter_into(out, x, group=axis.group, async_op=True), "reduce_scatter", axis
    )
    return Pending([work], lambda: out, x)


def all_gather(x: Tensor, axis: MeshAxis, into: Tensor | None = None) -> Pending:
    """The ranks' tensors concatenated along dim 0: [n, …] -> [n · size, …]. `into` may be a buffer whose part
    of this rank is x itself."""
    if axis.size == 1:
        return Pending([], lambda: x)
    axis.traffic["all_gather", axis.name] += 1
    x = x.contiguous()
    if _is_gloo(axis):
        return _gather(x, axis, into)
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:])) if into is None else into
    return Pending(
        [group_work(lambda: all_gather_into(out, x, group=axis.group, async_op=True), "all_gather", axis)],
        lambda: out,
        x,
    )
