"""Collectives through shared memory give the bits of those through sockets, in any order of waiting, and never wait for
ever."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalite.mesh.mesh import MeshAxis
from megalite.parallel.collectives import CommunicationError, all_gather, all_reduce, reduce_scatter
from megalite.system.shared_memory import SLOT_BYTES, SharedMemory
from tests.support.jobs_parts import plain_mesh

OPERATIONS = (all_reduce, reduce_scatter, all_gather)


def both_ways(context: Any, dtype: torch.dtype) -> list[tuple[str, bool]]:
    """Whether each operation gives the same bits both ways, for sizes on both sides of every limit."""
    axis = plain_mesh(context, tp=context.world).tp
    assert axis.shared is not None
    generator, results = torch.Generator().manual_seed(context.rank), []
    widest = SLOT_BYTES // dtype.itemsize // context.world
    for rows in (1, 7, widest // 4 - 1, widest, widest + 1):
        x = torch.randn(context.world * rows, generator=generator).to(dtype)
        for operation in OPERATIONS:
            before = axis.shared.published
            result, expected = (
                operation(x.clone(), axis).wait(),
                operation(x.clone(), replace(axis, shared=None)).wait(),
            )
            results.append((f"{operation.__name__} of {x.nbytes} bytes", torch.equal(result, expected)))
            published = axis.shared.published > before
            results.append(("goes through memory where it fits", published or x.nbytes > SLOT_BYTES))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gives_the_bits_of_sockets(world, dtype, ranks):
    for result in ranks.run(world, both_ways, dtype):
        assert [what for what, right in result if not right] == []


def two_at_a_time(context: Any, rounds: int) -> bool:
    """Two collectives under way, awaited in either order, by ranks that are late at random; True if every result is
    right."""
    axis, late, right = plain_mesh(context, tp=context.world).tp, random.Random(context.rank), True
    order = random.Random(0)
    for number in range(rounds):
        x = torch.full((order.choice((4, 1000, 30_000)) * context.world,), float(number + context.rank))
        first, second = all_gather(x, axis), all_reduce(x * 2, axis)
        time.sleep(late.choice((0, 0, 0, 0.002)))
        swap = late.random() < 0.5
        reduced, gathered = (second.wait(), first.wait()) if swap else (first.wait(), second.wait())[::-1]
        expected = torch.arange(context.world, dtype=torch.float32) + number
        right = right and torch.equal(gathered, expected.repeat_interleave(len(x)))
        right = right and torch.equal(reduced, (2 * expected.sum()).expand(len(x)))
    return right


def test_messages_are_read_in_any_order_and_no_slot_is_taken_too_early(ranks):
    assert ranks.run(4, two_at_a_time, 200) == [True] * 4


def silent(context: Any) -> str | None:
    """Rank 1 says nothing: what the others hear."""
    axis = plain_mesh(context, tp=context.world).tp
    shared = SharedMemory.open(axis.ranks, axis.group, timedelta(seconds=3))
    assert shared is not None
    return None if context.rank == 1 else message_of(replace(axis, shared=shared), torch.ones(3))


def message_of(axis: MeshAxis, x: Tensor) -> str:
    with pytest.raises(CommunicationError) as caught:
        all_reduce(x, axis).wait()
    return str(caught.value)


def test_a_rank_that_does_not_answer_is_named(ranks):
    messages = ranks.run(3, silent)
    assert [messages[rank] for rank in (0, 2)] == [
        f"rank {rank}: all_reduce over tp failed, because rank 1 was lost: no message within 3 s" for rank in (0, 2)
    ]


def unavailable(context: Any) -> bool:
    """One rank cannot open the file, as on another host: whether all do without."""
    axis = plain_mesh(context, tp=context.world).tp
    with patch("os.open", side_effect=FileNotFoundError) if context.rank == 1 else nullcontext():
        return SharedMemory.open(axis.ranks, axis.group, timedelta(seconds=60)) is None


def test_ranks_of_other_hosts_do_without(ranks):
    assert ranks.run(3, unavailable) == [True] * 3


def test_nothing_is_left_behind(ranks):
    ranks.run(2, both_ways, torch.float32)
    assert not list(Path("/dev/shm").glob("megalite-*"))
