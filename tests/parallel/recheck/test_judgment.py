"""Who is wrong, from records of passes; and that a digest has every bit."""

from __future__ import annotations

import pytest
import torch

from megalite.parallel.recheck.judgment import Pass, judge
from megalite.parallel.recheck.pass_record import GRADIENTS, RECEIVED, SENT, Event, PassRecord, digest
from megalite.system.activity import Activity

TWO, THREE = [(0, 1), (2, 3)], [(0, 1), (2, 3), (4, 5)]


def passes(blocks: list[tuple[int, ...]], shifts: tuple[int, ...], wrong: dict[tuple[int, int], str]) -> list[Pass]:
    """Passes in which the two ranks of a block exchange a value, and accumulate gradients of both.

    Args:
        wrong: (pass, rank) → where its values become wrong: before it sends, or after it has received.
    """
    results = []
    for number, shift in enumerate(shifts):
        records: dict[int, tuple[Event, ...]] = {}
        for index, block in enumerate(blocks):
            samples = (index - shift) % len(blocks)
            errors = [wrong.get((number, rank), "") for rank in block]
            sent = [100 * samples + 10 * place + (error == "sent") for place, error in enumerate(errors)]
            for place, rank in enumerate(block):
                records[rank] = (
                    Event(SENT, "a", "F0.0", sent[place]),
                    Event(RECEIVED, "a", "F0.0", sent[1 - place]),
                    Event(GRADIENTS, "w", "B0.0", sum(sent) + 7 * (errors[place] == "gradients")),
                )
        results.append(Pass(shift, [records[rank] for rank in sorted(records)]))
    return results


@pytest.mark.parametrize(
    "blocks, shifts, wrong, culprits, decided, usable",
    [
        (THREE, (1, 0, 2, 0), {}, [], True, True),
        (THREE, (1, 0, 2, 0), {(0, 3): "sent"}, [3], True, True),
        (THREE, (1, 0, 2, 0), {(1, 4): "gradients"}, [4], True, True),
        # always wrong, and named by two others
        (THREE, (1, 0, 2, 0), dict.fromkeys(((number, 2) for number in range(4)), "sent"), [2], True, False),
        (TWO, (1, 0, 1, 0), {(0, 0): "gradients"}, [0], True, True),
        (TWO, (1, 0, 1, 0), dict.fromkeys(((number, 1) for number in range(4)), "sent"), [1, 3], False, False),
        (TWO[:1], (0, 0, 0, 0), {(1, 1): "sent"}, [1], True, True),
        (TWO[:1], (0, 0, 0, 0), {(3, 1): "sent"}, [1], True, False),
        (TWO[:1], (0, 0, 0, 0), {(1, 1): "sent", (2, 0): "gradients"}, [0, 1], True, True),
        (TWO[:1], (0, 0, 0, 0), {(0, 1): "sent", (1, 1): "sent"}, [1], False, False),
    ],
)
def test_the_rank_where_a_difference_began_is_named(blocks, shifts, wrong, culprits, decided, usable):
    judgment = judge(passes(blocks, shifts, wrong), blocks)
    assert sorted(each.rank for each in judgment.culprits) == culprits
    assert (judgment.decided, judgment.last_is_right) == (decided, usable)
    assert all(each.event is not None and each.event.kind != RECEIVED for each in judgment.culprits)


def test_a_message_that_changes_on_its_way_names_its_receiver():
    changed = passes(TWO, (1, 0, 1, 0), {})
    first, received, gradients = changed[1].records[2]
    events = list(changed[1].records)
    events[2] = (first, received._replace(digest=-1), gradients._replace(digest=-2))
    (culprit,) = judge([changed[0], Pass(0, events), *changed[2:]], TWO).culprits
    assert (culprit.rank, culprit.number, culprit.event) == (2, 1, events[2][1])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("length", [6, 32])  # 32: whole integers of 64 bits
def test_every_bit_changes_a_digest_and_the_order_of_digests_a_summary(length, dtype):
    values = torch.arange(length).view(2, -1).to(dtype).t()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for bit in range(1 if dtype == torch.bool else 8 * dtype.itemsize):
        flipped = torch.empty(values.numel() + 1, dtype=dtype)[1:].view_as(values).copy_(values)
        flipped.view(integers)[2, 1] ^= torch.tensor(1).bitwise_left_shift(bit).to(integers)
        assert digest(flipped) != digest(values)

    def summary(*tensors: torch.Tensor) -> list[int]:
        record = PassRecord(Activity(), "cpu")
        for tensor in tensors:
            record.sent("all_reduce over tp", tensor)
        record.sent("all_reduce over data", values)  # not inside a replica
        return record.summary().tolist()

    one, other = values, values[1:]
    assert summary(one, other) == summary(one.clone(), other.contiguous())
    assert len({tuple(summary(*each)) for each in ((one, other), (other, one), (one,), ())}) == 4
