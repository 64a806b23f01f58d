"""What ZeRO-2 sends between nodes, by hand, and when the planner says that another option sends less."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.model.parameters import model_specs
from megalite.parallel.spec import parameter_count
from megalite.planner.report.zero2_hint import zero2_hint

NODE, WORLD, MICROBATCHES = 4, 8, 6
MIB = 2**20


def config(microbatches: int = MICROBATCHES, **parallel: Any) -> Config:
    dp = WORLD // (parallel.get("tp", 1) * parallel.get("cp", 1))
    train = {"global_batch_size": microbatches * dp, "micro_batch_size": 1, "precision": "bf16"}
    model = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1024,
    }
    return from_dict(
        {"model": model, "data": {"sequence_length": 128}, "train": train, "parallel": {"zero": 2, **parallel}}
    )


def test_the_bytes_of_each_option_are_those_of_rings_between_two_nodes() -> None:
    line = zero2_hint(config(), WORLD, NODE)
    parameters = parameter_count(model_specs(config().model))
    share = (WORLD - 1) / WORLD / NODE  # of a collective's bytes: what one card of four sends to the other node
    expected = {
        f"each of {MICROBATCHES} microbatches reduces between nodes": (MICROBATCHES * 4 + 2) * parameters * share,
        "parallel.zero: 1": (4 + 2) * parameters * share,
        f"parallel.dp_shard: {NODE}": 2 * 4 * parameters / NODE / 2,
    }
    matches = [float(number) * MIB for number in re.findall(r"([\d.]+) MiB", str(line))]
    assert matches == pytest.approx(list(expected.values()), rel=0.01) and all(
        name in str(line) for name in list(expected)[1:]
    ), line


def test_ranks_of_cp_count_as_those_of_dp() -> None:
    """Gradients are reduced over data = dp · cp, and dp_shard may be any divisor of it: the same bytes for cp 4 and dp
    2 as for dp 8."""
    line = zero2_hint(config(cp=4, context="gather"), WORLD, NODE)
    assert line is not None and line == zero2_hint(config(), WORLD, NODE)


@pytest.mark.parametrize(
    "changed, world, node",
    [
        ({"zero": 1}, WORLD, NODE),
        ({"zero": 3}, WORLD, NODE),  # it gathers for each use as well: another question
        ({"dp_shard": NODE}, WORLD, NODE),
        ({"microbatches": 1}, WORLD, NODE),
        ({}, WORLD, WORLD),
        ({"tp": 4}, WORLD, NODE * 2),
    ],
    ids=str,
)
def test_nothing_is_said_where_nothing_is_lost(changed: dict[str, Any], world: int, node: int) -> None:
    assert zero2_hint(config(**changed), world, node) is None
