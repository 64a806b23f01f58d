"""The layout for each number of ranks of an elastic run."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config import elastic
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.schema import Config
from megalite.training.dry_run import ABOUT_FILES


def config(parallel: dict[str, Any], min_ranks: int = 1, **others: dict[str, Any]) -> Config:
    """A model of 8 layers with 8 heads and a batch of 24, by default one row at once."""
    model = {
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8},
        **{"num_attention_heads": 8, "num_key_value_heads": 8},
    }
    train = {"global_batch_size": 24, "micro_batch_size": 1, "steps": 10, **others.get("train", {})}
    return from_dict(
        {
            "model": {**model, **others.get("model", {})},
            "train": train,
            "data": {"train": "none", "sequence_length": 64},
            "parallel": {**parallel, "min_ranks": min_ranks},
        }
    )


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# largest layout, further options → number of ranks → what differs from it
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[int, dict[str, Any]]]] = {
    "dp divides the batch": (
        {"dp": 8},
        {},
        {
            8: {"dp": 8},
            7: {"dp": 6},
            6: {"dp": 6},
            5: {"dp": 4},
            4: {"dp": 4},
            3: {"dp": 3},
            2: {"dp": 2},
            1: {"dp": 1},
        },
    ),
    "dp divides every stage of a ramp-up": (
        {"dp": 8},
        {"train": {"rampup_batch_size": [8, 16, 100]}},
        {7: {"dp": 4}, 6: {"dp": 4}, 3: {"dp": 2}, 1: {"dp": 1}},
    ),
    "microbatches stay": (
        {"dp": 6},
        {"train": {"micro_batch_size": 4}},
        {5: {"dp": 3}, 4: {"dp": 3}, 2: {"dp": 2}},
    ),
    "pp and tp stay while a replica fits": (
        {"tp": 2, "pp": 2, "dp": 3},
        {},
        {8: {"dp": 2}, 7: {"dp": 1}, 3: {"pp": 1, "dp": 1}, 1: {"tp": 1, "pp": 1, "dp": 1}},
    ),
    "the most ranks with fewer stages": (
        {"tp": 1, "pp": 8, "dp": 1},
        {},
        {7: {"pp": 7}, 6: {"pp": 6}, 5: {"pp": 5}},
    ),
    "a partition belongs to its stages": (
        {"pp": 2, "dp": 2, "partition": [3, 5]},
        {},
        {3: {"dp": 1}, 1: {"pp": 1, "dp": 1, "partition": None}},
    ),
    "experts over fewer ranks": (
        {"dp": 8, "ep": 8},
        {"model": EXPERTS},
        {7: {"dp": 6, "ep": 2}, 4: {"dp": 4, "ep": 4}, 3: {"dp": 3, "ep": 1}},
    ),
    "groups of shards": (
        {"dp": 8, "dp_shard": 4, "zero": 3},
        {},
        {7: {"dp": 6, "dp_shard": 3}, 4: {"dp": 4, "dp_shard": 4}, 2: {"dp": 2, "dp_shard": 2}},
    ),
    "cp is the last to go": (
        {"cp": 2, "dp": 2, "context": "ring"},
        {},
        {3: {"dp": 1}, 2: {"dp": 1}, 1: {"cp": 1, "dp": 1}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layouts_by_number_of_ranks(name):
    largest, options, expected = CASES[name]
    given = config(largest, **options)
    by_size = elastic.layouts(given, expected, ABOUT_FILES)
    for ranks, changed in expected.items():
        wanted = from_dict({"parallel": {**largest, "min_ranks": 1, **changed}}).parallel
        assert by_size[ranks] == wanted, ranks
    assert given == config(largest, **options), "the given one is not changed"


def test_a_start_takes_the_layout_of_its_processes():
    given = config({"tp": 2, "dp": 4}, min_ranks=2)
    assert elastic.fit_layout(given, 7, ABOUT_FILES) == 6 and (given.parallel.tp, given.parallel.dp) == (2, 3)
    given = config({"tp": 2, "dp": None}, min_ranks=2)  # dp fills the largest number of ranks
    assert elastic.fit_layout(given, 8, ABOUT_FILES) == 8 and given.parallel.dp == 4


def test_the_table_has_a_row_for_each_number():
    lines = elastic.table(elastic.layouts(config({"tp": 2, "dp": 2}), range(4, 0, -1), ABOUT_FILES))
    assert lines == [
        "ranks  spares  layout",
        "    4       0  tp 2 · pp 1 · dp 2",
        "    3       1  tp 2 · pp 1 · dp 1",
        "    2       0  tp 2 · pp 1 · dp 1",
        "    1       0  tp 1 · pp 1 · dp 1",
    ]


@pytest.mark.parametrize(
    "parallel, min_ranks, processes, message",
    [
        ({"dp": 4}, 5, 4, "parallel.min_ranks = 5 exceeds the 4 ranks of the layout. Legal values: 1 to 4."),
        ({"dp": 4}, 2, 1, "parallel.min_ranks = 2 exceeds the run's 1 processes. Start at least 2"),
        ({"dp": 4}, 2, 6, "parallel.dp = 4 with tp * pp * cp = 1 makes 4 ranks, fewer than the run's 6 processes."),
        (
            {"dp": 4, "powersgd_rank": 2},
            2,
            4,
            "parallel.min_ranks = 2 is not supported with parallel.powersgd_rank = 2",
        ),
        ({"dp": 5}, 2, 4, "train.global_batch_size = 24 is not a multiple"),
    ],
)
def test_what_can_not_run_is_one_message(parallel, min_ranks, processes, message):
    with pytest.raises(ConfigError) as caught:
        elastic.fit_layout(config(parallel, min_ranks), processes, ABOUT_FILES)
    assert str(caught.value).startswith(message)
