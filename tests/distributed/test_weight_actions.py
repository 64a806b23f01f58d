"""Under a split backward, weight gradients are computed by the schedule's weight passes and by nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.support import jobs_schedules
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.layouts import Case

MODEL: Case = {**SINGLE, "kv_heads": 4, "vocab_size": 96, "layers": 8, "masked": False, "dropout": 0.0, "tied": False}
MICROBATCHES = 4


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v", "v-half"])
def test_matrices_wait_for_their_weight_pass_and_buckets_for_their_last_matrix(schedule, recompute, ranks, tmp_path):
    """Each pass changes exactly the accumulated gradients that it should, and a bucket is reduced the moment it is
    complete."""
    case = {**MODEL, "pp": 2, "dp": 2, "microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
    config = config_of(case, write_tokens(tmp_path, case["vocab_size"]))
    results = ranks.run(4, jobs_schedules.weight_passes, config)
    for result in results:
        assert [(event["kind"], event["stage"]) for event in result["events"]] == result["plan"]
        contributions: Counter[str] = Counter()
        reduced: set[str] = set()  # their sums arrive at any time
        for event in result["events"]:
            of_stage = result["stages"][event["stage"]]
            expected = [name for name, by_weight_pass in of_stage.items() if by_weight_pass == (event["kind"] == "W")]
            contributions.update(expected)
            complete = [
                bucket for bucket in result["buckets"] if all(contributions[name] == MICROBATCHES for name in bucket)
            ]
            assert set(expected) <= set(event["changed"])
            reduced.update(*complete)
            assert set(event["changed"]) - set(expected) <= reduced
            assert event["reductions"] == len(complete)
        assert set(contributions.values()) == {MICROBATCHES} and len(contributions) == sum(
            map(len, result["stages"].values())
        )
        assert len(complete) == len(result["buckets"]) > 1
    assert any(one == other == "B" for result in results for (one, _), (other, _) in pairwise(result["plan"])), (
        "some are put off"
    )
