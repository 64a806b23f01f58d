"""What recurrences send over cp, by passing states and by exchanging heads, and the choice between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.config.load import from_dict
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.parallel import ParallelConfig
from megalite.families.presets import preset
from megalite.model.blocks.delta import context as delta
from megalite.model.blocks.mamba import context as mamba
from megalite.model.cost.mixers import StateSizes, exchange_of, exchanged_heads, exchanges_heads, passed_states
from megalite.model.cost.records import ContextExchange, Share
from megalite.model.cost.units import Units
from megalite.planner.api import describe_state_exchange
from tests.support import jobs_context

CP, BATCH = 4, 2
QWEN, NEMOTRON = (ModelConfig(**preset(name)) for name in ("qwen3-next-80b-a3b", "nemotron-h-56b"))
LONG = 32_768


def share_of(length: int, **options: Any) -> Share:
    return Share.of(ParallelConfig(**{"cp": CP, "context": "gather", **options}), length, 1)


def sent(exchange: ContextExchange, width: int = 2) -> float:
    """Bytes of forward and backward."""
    return exchange.size_in_bytes(width, max(width, 4)) * (exchange.ranks - 1) / exchange.ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rule", ["delta", "mamba"])
@pytest.mark.parametrize("parts, segments, tokens", [("contiguous", 1, 4), ("zigzag", 2, 4), ("zigzag", 2, 8)])
def test_passed_states_grow_with_segments_and_not_with_tokens(parts, segments, tokens, rule, dtype, ranks):
    """As the formula says, and as plans count."""
    heads, dk, dv = 2, 6, 5
    wide, factors = max(dtype.itemsize, 4), dk * dk if rule == "delta" else 1
    each = (CP - 1) * segments * BATCH * heads * wide
    expected = [each * (factors + dk * dv), each * dk * dv]
    arguments = False, parts, CP * tokens, (heads, dk, dv), rule == "delta", dtype
    assert ranks.run(CP, jobs_context.recur, *arguments) == [expected] * CP
    share = Share(tokens, BATCH, cp=CP, context="ulysses" if segments == 1 else "gather")
    sizes = StateSizes(0, 1, (heads, dk, dv), heads, diagonal=0 if rule == "delta" else 1)
    assert sent(passed_states(share, sizes), dtype.itemsize) == sum(expected)


@pytest.mark.parametrize("rule", ["delta", "mamba"])
def test_exchanged_heads_grow_with_tokens(rule, ranks):
    heads, dk, dv, tokens = 4, 6, 5, 4
    arguments = True, "zigzag", CP * tokens, (heads, dk, dv), rule == "delta", torch.bfloat16
    wide = heads * (2 if rule == "delta" else 1)
    sizes = StateSizes(0, 1, (heads, dk, dv), heads, exchanged=heads * (2 * dk + dv), wide=wide)
    planned = sent(exchanged_heads(Share(tokens, BATCH, cp=CP, context="gather"), sizes))
    assert [sum(rank) for rank in ranks.run(CP, jobs_context.recur, *arguments)] == [planned] * CP


def test_states_of_a_long_row_are_few_bytes():
    """Of a layer of 80 billion parameters, over 4 ranks, without the convolution."""
    share = share_of(LONG)
    sizes = delta.state_sizes(QWEN, share)._replace(taps=1)
    heads = sent(exchanged_heads(share, sizes))
    assert sent(passed_states(share_of(LONG, context="ulysses"), sizes)) < 0.07 * heads, "contiguous parts"
    assert sent(passed_states(share, sizes)) < 0.13 * heads, "zigzag"
    assert sent(passed_states(share_of(LONG, context_parts="balanced"), sizes)) > heads, "many segments"


@pytest.mark.parametrize("model, room", [(QWEN, delta), (NEMOTRON, mamba)], ids=["delta", "mamba"])
def test_auto_is_what_sends_fewer_bytes(model, room):
    """Long rows pass states; short rows, and rows of many segments, exchange heads."""
    for length, parts, by_heads in ((LONG, "zigzag", False), (1024, "zigzag", True), (LONG, "balanced", True)):
        share = share_of(length, context="auto", context_parts=parts)
        sizes = room.state_sizes(model, share)
        bytes_sent = [sent(each(share, sizes)) for each in (passed_states, exchanged_heads)]
        assert exchanges_heads(share, sizes) == by_heads == (bytes_sent[1] < bytes_sent[0])
        chosen = exchange_of(share, sizes)
        assert chosen is not None and sent(chosen) == min(bytes_sent)


def test_auto_passes_states_where_ranks_have_no_whole_heads():
    share = replace(share_of(1020, context="auto"), cp=3)
    assert not exchanges_heads(share, delta.state_sizes(QWEN, share))


@pytest.mark.parametrize(
    "options, says",
    [
        ({}, "delta blocks pass states, 36.6 MiB; exchanging heads would be 389.1 MiB: sent per layer"),
        ({"context": "ulysses"}, "delta blocks exchange heads, "),
        ({"context_parts": "balanced", "context": "auto"}, "passing states would be at most "),
        ({"cp": 3}, "they have no whole heads to exchange"),
    ],
)
def test_plans_print_both(options, says):
    config = from_dict({"model": preset("qwen3-next-80b-a3b"), "data": {"sequence_length": LONG}})
    config.parallel = ParallelConfig(**{"cp": CP, "context": "gather", "dp": 1, **options})
    config.train.precision, config.train.micro_batch_size = "bf16", 1
    (line,) = describe_state_exchange(config)
    assert says in line


def test_auto_gathers_keys_and_values():
    automatic, gathered = (Units(QWEN, share_of(1024, context=context)).layer(3) for context in ("auto", "gather"))
    assert automatic == gathered and automatic.blocks[0].exchanges[0].method == "gather"
