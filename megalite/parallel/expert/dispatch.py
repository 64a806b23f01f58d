"""Dispatch of the rows of tokens to their experts, and combine of the results.

                 forward                                             backward
    local        none                                                none
    all_to_all   all-gather of counts, read by the host; rows to     two all-to-all of the same sizes
                 the ranks of their experts and back: two
                 all-to-all
    all_gather   all-gather of all rows, choices and weights;        all-gather; reduce-scatter of both
                 reduce-scatter of the sums                          gradients
    same_rows    all-reduce of the sums                              none, used in inference only

A dispatch is started (`begin`) before other work is queued, which the device executes while the host waits
for the counts. The result of `begin` is kept in the choice, so that recomputation (activation checkpointing)
and backward neither communicate nor read it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from megalite_kernels.groups import Groups
from megalite_kernels.permutation import count, gather_rows, inverse_order, order_by_column
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.all_to_all import all_to_all
from megalite.parallel.collectives import Pending, all_gather, all_reduce, reduce_scatter
from megalite.parallel.expert.choice import (
    ExpertChoice,
    combine,
    combine_gradient,
    spread,
    spread_gradient,
)
from megalite.parallel.node import Differentiable, Saved
from megalite.system.pinned_memory import read_aside


class RowDispatch(Protocol):
    """Interface of a dispatch, which sends rows to their experts.

    `experts` are those of this rank, a function of rows [n, hidden] sorted by expert and their `Groups`.
    """

    def begin(self, choice: ExpertChoice) -> None:
        """Start the operations that a choice requires before its rows can be sent."""

    def compute(
        self, rows: Tensor, weights: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> Tensor:
        """Return Σ_k weight · expert(row): [tokens, hidden], [tokens, k] -> [tokens, hidden]."""

    def gradient(
        self, grad: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of rows and weights, new tensors, and accumulate those of the experts."""


class LocalDispatch:
    """Dispatch with all experts on this rank."""

    def begin(self, choice: ExpertChoice) -> None:
        """Do nothing, because nothing is sent."""

    def compute(
        self, rows: Tensor, weights: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> Tensor:
        if "groups" not in choice.kept:
            choice.kept["groups"] = Groups(choice.counts)  # not needed on the host, because nothing is sent
        done = experts.compute(spread(rows, choice), saved, choice.kept["groups"])
        saved.append((done, weights))
        return combine(done, weights, choice)

    def gradient(
        self, grad: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> tuple[Tensor, Tensor]:
        drows, dweights = combine_gradient(grad, saved.pop(), choice)
        drows = experts.gradient(drows, saved, choice.kept["groups"])
        return spread_gradient(drows, choice), dweights


def exchange(rows: Tensor, send: list[int], receive: list[int], axis: MeshAxis) -> Tensor:
    """Return the rows that the ranks send to this one; its backward is the exchange with the sizes swapped.

    `axis.traffic` counts the bytes that this rank sends to others under all_to_all_bytes.
    """
    row_bytes = rows[:1].numel() * rows.itemsize
    axis.traffic["all_to_all_bytes", axis.name] += (len(rows) - send[axis.rank]) * row_bytes
    return all_to_all(rows, axis, send, receive).wait()


class PendingCounts:
    """Result of a collective in flight, and numbers computed from it for the host.

    The host waits for the collective and for the copy, but not for work that is queued on the device in the
    meantime: on a GPU both run on a separate stream.

    Args:
        pending: the collective.
        like: a tensor on its device.
        count: tensor → numbers.
    """

    def __init__(self, pending: Pending, like: Tensor, count: Callable[[Tensor], Tensor]):
        self._pending, self._count = pending, count
        self._read = None if like.is_cpu else read_aside(self._counted, like.device)

    def _counted(self) -> Tensor:
        self._value = self._pending.wait()
        return self._count(self._value)

    def wait(self) -> tuple[Tensor, list[int]]:
        """Return the tensor and the flat numbers.

        Both have arrived, so that no stream has to wait for another.
        """
        numbers = self._counted() if self._read is None else self._read()
        return self._value, numbers.flatten().tolist()


class _Route(NamedTuple):
    """Sizes and order of one all-to-all.

    Attributes:
        send, receive: number of rows to and from each rank.
        groups: number of rows of each of this rank's experts.
        order: permutation of the received rows, sorted by rank and then by expert, to the order by expert and
            then by rank; and its inverse.
    """

    send: list[int]
    receive: list[int]
    groups: Groups
    order: Tensor
    inverse: Tensor


class AllToAllDispatch:
    """Dispatch in which each rank sends its rows to the ranks of their experts."""

    def __init__(self, axis: MeshAxis, sharing: int):
        self.axis, self.sharing = axis, sharing

    def begin(self, choice: ExpertChoice) -> None:
        if "route" not in choice.kept and "counts" not in choice.kept:
            counts = all_gather(choice.counts.unsqueeze(0), self.axis)  # [1, experts] -> [ep, experts]
            choice.kept["counts"] = PendingCounts(counts, choice.counts, lambda whole: whole)

    def compute(
        self, rows: Tensor, weights: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> Tensor:
        if "route" not in choice.kept:
            choice.kept["route"] = self._route(*choice.kept.pop("counts").wait())
        send, receive, groups, order, inverse = choice.kept["route"]
        sent = choice.first(sum(send))
        arrived = exchange(spread(rows, sent), send, receive, self.axis)
        done = experts.compute(gather_rows(arrived, order), saved, groups)
        returned = exchange(gather_rows(done, inverse), receive, send, self.axis)
        saved.append((returned, weights))
        return combine(returned, weights, sent)

    def gradient(
        self, grad: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> tuple[Tensor, Tensor]:
        send, receive, groups, order, inverse = choice.kept["route"]
        sent = choice.first(sum(send))
        drows, dweights = combine_gradient(grad, saved.pop(), sent)
        drows = gather_rows(exchange(drows, send, receive, self.axis), order)
        drows = gather_rows(experts.gradient(drows, saved, groups), inverse)
        return spread_gradient(exchange(drows, receive, send, self.axis), sent), dweights

    def _route(self, counts: Tensor, flat: list[int]) -> _Route:
        """Return the sizes and order of the all-to-all.

        Args:
            counts: [ep, experts], number of rows that each rank sends to each expert.
            flat: the same numbers on the host.
        """
        ep, number = counts.shape
        own = number // ep
        host = [flat[rank * number : (rank + 1) * number] for rank in range(ep)]
        mine = slice(self.axis.rank * own, (self.axis.rank + 1) * own)
        send = [sum(host[self.axis.rank][rank * own : (rank + 1) * own]) for rank in range(ep)]
        receive = [sum(row[mine]) for row in host]
        sizes = [sum(column) for column in zip(*(row[mine] for row in host), strict=True)]
        order = order_by_column(counts[:, mine], sum(receive))
        groups = Groups(counts[:, mine].sum(0), sizes, lambda: _runs(counts[:, mine], self.sharing))
        return _Route(send, receive, groups, order, inverse_order(order, len(order)))


class AllGatherDispatch:
    """Dispatch in which every rank receives all rows, and the sums are scattered.

    Each rank computes the rows of its experts. This requires fewer, larger messages, which suits small
    groups.
    """

    def __init__(self, axis: MeshAxis, sharing: int):
        self.axis, self.sharing = axis, sharing

    def begin(self, choice: ExpertChoice) -> None:
        if "whole" not in choice.kept and "chosen" not in choice.kept:
            number = len(choice.counts)
            # not sent, because they belong to no expert
            own = choice.experts.flatten().masked_fill(choice.inverse >= len(choice.order), number)
            chosen = all_gather(own.view_as(choice.experts), self.axis)  # [tokens, k] -> [ep · tokens, k]
            choice.kept["chosen"] = PendingCounts(
                chosen, own, lambda whole: count(whole.flatten(), number + 1)
            )

    def compute(
        self, rows: Tensor, weights: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> Tensor:
        if "whole" not in choice.kept:
            chosen, sizes = choice.kept.pop("chosen").wait()
            choice.kept["whole"] = _own_rows(chosen, len(choice.counts), sizes, self.axis, self.sharing)
        whole: ExpertChoice = choice.kept["whole"]
        rows = all_gather(rows, self.axis).wait()  # [ep · tokens, hidden]
        done = experts.compute(spread(rows, whole), saved, whole.kept["groups"])
        weights = all_gather(weights, self.axis).wait()
        saved.append((done, weights))
        return reduce_scatter(combine(done, weights, whole), self.axis).wait()

    def gradient(
        self, grad: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> tuple[Tensor, Tensor]:
        whole: ExpertChoice = choice.kept["whole"]
        # each rank has used the rows and weights of all ranks
        drows, dweights = combine_gradient(all_gather(grad, self.axis).wait(), saved.pop(), whole)
        dweights = reduce_scatter(dweights, self.axis).wait()
        drows = experts.gradient(drows, saved, whole.kept["groups"])
        return reduce_scatter(spread_gradient(drows, whole), self.axis).wait(), dweights


class SameRowsDispatch:
    """Dispatch if all ranks have the same rows, as with tensor parallelism without a split sequence.

    Each rank computes the rows of its experts, and the sums are all-reduced.
    """

    def __init__(self, axis: MeshAxis):
        self.axis = axis

    def begin(self, choice: ExpertChoice) -> None:
        """Do nothing, because nothing is sent."""

    def compute(
        self, rows: Tensor, weights: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> Tensor:
        own = _own_rows(choice.experts, len(choice.counts), choice.counts.tolist(), self.axis, 1)
        done = experts.compute(spread(rows, own), saved, own.kept["groups"])
        return all_reduce(combine(done, weights, own), self.axis).wait()

    def gradient(
        self, grad: Tensor, saved: Saved, choice: ExpertChoice, experts: Differentiable
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("used in inference only")


def _runs(counts: Tensor, sharing: int) -> Tensor:
    """Return the rows of each expert from each microbatch, [experts, microbatches].

    Args:
        counts: [ranks, experts], from each rank.
        sharing: number of consecutive ranks that share a microbatch.
    """
    return counts.unflatten(0, (-1, sharing)).sum(1).t()


def _own_rows(chosen: Tensor, number: int, sizes: list[int], axis: MeshAxis, sharing: int) -> ExpertChoice:
    """Return the choice for the tokens of several ranks, [tokens, k], restricted to this rank's experts.

    Args:
        number: number of experts.
        sizes: number of rows of each expert, optionally followed by those that are not sent.
        sharing: number of consecutive ranks that share a microbatch.
    """
    flat, own = chosen.flatten(), number // axis.size
    first = axis.rank * own
    start, sizes = sum(sizes[:first]), sizes[first : first + own]
    order = flat.argsort(stable=True)[start : start + sum(sizes)]
    whole = ExpertChoice(chosen, order, inverse_order(order, len(flat)), count(flat, number + 1))

    def runs() -> Tensor:
        counts = [count(part.flatten(), number + 1) for part in chosen.chunk(axis.size)]
        return _runs(torch.stack(counts)[:, first : first + own], sharing)

    whole.kept["groups"] = Groups(whole.counts[first : first + own], sizes, runs)
    return whole


def make_dispatch(name: str, axis: MeshAxis, sharing: int) -> RowDispatch:
    """Return the dispatch over an expert axis.

    Args:
        name: `parallel.expert_dispatch`, or same_rows if all its ranks have the same rows.
        sharing: number of consecutive ranks that share a microbatch.
    """
    if axis.size == 1:
        return LocalDispatch()
    if name == "same_rows":
        return SameRowsDispatch(axis)
    return (AllToAllDispatch if name == "all_to_all" else AllGatherDispatch)(axis, sharing)
